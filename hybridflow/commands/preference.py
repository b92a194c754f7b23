"""What `dpo`, `kto` and `reward_model` share: the data that they read, as the course of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hybridflow.commands.job import Job
from hybridflow.commands.offline import Course, run_course
from hybridflow.config.command import Command
from hybridflow.config.layouts import answers_held_out
from hybridflow.config.schema import Config
from hybridflow.data.preference import ExampleRows, PreferenceLoader, TextRow, preference_fingerprint
from hybridflow.gathering import Gathering
from hybridflow.models.config import Head
from hybridflow.parallel.world import World
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.preference import PreferenceTrainer
from hybridflow.trainer.preference_data import held_out_prompts, read_preferences
from hybridflow.trainer.rewards.inputs import require_parts

Tokenise = Callable[[Inputs, Sequence[TextRow]], ExampleRows]
MakeTrainer = Callable[[Inputs, World, Sequence[Any], ExampleRows], PreferenceTrainer]
Require = Callable[[Config, Any], None]


def prepare_preference(config: Config, command: Command, title: str, tokenise: Tokenise,
                       make_trainer: MakeTrainer, require: Require = lambda config, rows: None) -> Job:
    """Read everything that the config names; the job then trains, evaluates and exports, on all launched ranks.

    Args:
        make_trainer: from inputs, world, the first evaluation.prompts held-out rows, and all training rows.
        require: raises ValueError where the training rows are not what the command learns from.
    """
    head = Head.SCORE if command is Command.REWARD_MODEL else Head.LANGUAGE_MODEL
    answers, gathering = answers_held_out(config, command), Gathering()
    split = gathering.read(read_preferences, config)
    inputs = gathering.read(Inputs.read, config, scores=answers, head=head)
    gathering.finish()
    assert split is not None and inputs is not None
    require_parts(inputs.rewards, (record.data_source for record in split.prompts))
    rows = tokenise(inputs, split.train)
    require(config, rows)
    held_out = _held_out(config, tokenise(inputs, split.test)) if split.test else ()
    loader = PreferenceLoader(rows, config.train.global_batch_size, config.train.seed, config.data.shuffle)
    return partial(run_course, Course(
        command, title, inputs, config.preference.steps, preference_fingerprint((*split.train, *split.test)), loader,
        lambda inputs, world: make_trainer(inputs, world, held_out, rows),
        held_out=held_out_prompts(inputs, split) if answers else (), note=split.sentence()))


def _held_out(config: Config, rows: ExampleRows) -> tuple[Any, ...]:
    return tuple(rows.example(row) for row in rows.kept[:config.evaluation.prompts])
