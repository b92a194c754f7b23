"""`hybridflow train`: reinforcement learning from a config, on all ranks."""

from __future__ import annotations

from contextlib import closing
from functools import partial

from hybridflow.commands.job import Job
from hybridflow.config.batch_math import layout_table
from hybridflow.config.recipe import algorithm_line, with_recipe
from hybridflow.config.schema import Config
from hybridflow.data.loader import PromptLoader, TokenisedPrompt
from hybridflow.data.records import DataSplit
from hybridflow.parallel.world import World
from hybridflow.trainer.activations import activation_line
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.prompts import held_out_prompts, read_records, require_same, training_prompts
from hybridflow.trainer.rl import RLTrainer
from hybridflow.trainer.run import Run, RunParts


def prepare(config: Config) -> Job:
    """Read everything that the config names; the job then trains, evaluates and exports, on all launched ranks."""
    config = with_recipe(config)
    records = read_records(config)
    inputs = Inputs.read(config)
    loader = training_prompts(config, records, inputs.tokenizer, inputs.model.vocab_size)
    held_out = held_out_prompts(config, records, inputs.tokenizer, inputs.model.vocab_size)
    return partial(_run, inputs, records, loader, held_out)


def _run(inputs: Inputs, records: DataSplit, loader: PromptLoader, held_out: tuple[TokenisedPrompt, ...]) -> None:
    config = inputs.config
    with closing(World.from_env(config.train.timeout_s)) as world, closing(RLTrainer(inputs, world)) as trainer:
        require_same(world, (*records.train, *records.test))
        title = f"{config.algorithm.name.value}, world size {world.size}"
        whole = Run(config, world, title, config.train.total_steps)
        whole.view.say(algorithm_line(config))
        whole.view.say(trainer.batch_line())
        whole.view.say(layout_table(config, world.size))
        whole.view.say(activation_line(config, world.size, trainer.model))
        if loader.num_dropped:
            whole.view.say(f"{loader.num_dropped} of {len(records.train)} prompts are too long and were dropped.")
        for _ in range(trainer.steps_ahead):
            trainer.start(next(loader))
        whole.fit(RunParts(
            step=lambda: trainer.step(next(loader)), export=trainer.export, trace=trainer.trace, timer=trainer.timer,
            labels=trainer.labels(),
            evaluate=None if config.evaluation.every_steps is None else trainer.evaluator(held_out),
            samples=lambda: trainer.samples(config.logging.samples),
            trouble=lambda: trainer.trouble,
        ))
