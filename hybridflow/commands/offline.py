"""The run that the commands share which learn from given answers: `sft`, `dpo`, `kto` and `reward_model`.

Owns what they say at the start and the loop's parts. What is read, and what a step is, are the commands'.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from hybridflow.config.batch_math import layout_table, offline_line
from hybridflow.config.command import Command
from hybridflow.config.layouts import answers_held_out
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.row_source import RowLoader
from hybridflow.data.train_source import data_metrics
from hybridflow.parallel.world import World
from hybridflow.trainer.activations import activation_line
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.offline import OfflineTrainer
from hybridflow.trainer.prompts import FILES_DIFFER, require_equal
from hybridflow.trainer.run import Run, RunParts


@dataclass(frozen=True)
class Course:
    """What a command brings.

    Attributes:
        title: of the run, which tells the world size after it.
        mark: of all data, made of what JSON knows, to be compared over ranks.
        batches: the examples of each step, without end.
        make_trainer: called on the world.
        held_out: prompts that are answered in evaluations, where `answers_held_out` says that they are.
        unit: what the rows of `batches` are called.
        before: what rank 0 does first.
        note: a sentence on the data; None where there is nothing to say.
        stop_at_accuracy: see `RunParts`.
    """

    command: Command
    title: str
    inputs: Inputs
    steps: int
    mark: Any
    batches: RowLoader[Any]
    make_trainer: Callable[[Inputs, World], OfflineTrainer]
    held_out: tuple[TokenisedPrompt, ...] = ()
    unit: str = "rows"
    before: Callable[[], None] = lambda: None
    note: str | None = None
    stop_at_accuracy: float | None = None


def run_course(course: Course) -> None:
    """Train, evaluate and export on all launched ranks."""
    config = course.inputs.config
    with closing(World.from_env(config.train.timeout_s)) as world:
        require_equal(world, course.mark, FILES_DIFFER)
        with closing(course.make_trainer(course.inputs, world)) as trainer:
            whole = Run(config, world, f"{course.title}, world size {world.size}", course.steps)
            if world.rank == 0:
                course.before()
            for sentence in (offline_line(config, world.size, course.command),
                             layout_table(config, world.size, course.command),
                             activation_line(config, world.size, trainer.model, command=course.command),
                             course.batches.counts.sentence(course.batches.num_rows, course.unit), course.note):
                if sentence is not None:
                    whole.view.say(sentence)
            prompts = course.held_out if answers_held_out(config, course.command) else ()
            whole.fit(RunParts(
                step=lambda: trainer.step(next(course.batches)) | data_metrics(course.batches), export=trainer.export,
                trace=trainer.trace, timer=trainer.timer, stop_at_accuracy=course.stop_at_accuracy,
                labels={rank: trainer.actor.blueprint.grid.coord(rank).words() for rank in range(world.size)},
                evaluate=None if config.evaluation.every_steps is None else trainer.evaluator(prompts),
                answers=trainer.answers,
            ))
