"""`hybridflow train`: reinforcement learning from a config, on all ranks."""

from __future__ import annotations

from contextlib import closing
from functools import partial

from hybridflow.commands.job import Job
from hybridflow.config.batch_math import layout_table
from hybridflow.config.recipe import algorithm_line, with_recipe
from hybridflow.config.schema import Config
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.row_source import RowLoader
from hybridflow.data.sft import SftExample
from hybridflow.data.train_source import data_metrics
from hybridflow.gathering import Gathering
from hybridflow.parallel.world import World
from hybridflow.trainer.activations import activation_line
from hybridflow.trainer.evaluate import answer_lines
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.prompts import (
    RunData,
    held_out_prompts,
    read_records,
    require_same_data,
    training_pairs,
    training_prompts,
)
from hybridflow.trainer.rewards.inputs import require_parts
from hybridflow.trainer.rl import RLTrainer
from hybridflow.trainer.run import Run, RunParts


def prepare(config: Config) -> Job:
    """Read everything that the config names; the job then trains, evaluates and exports, on all launched ranks."""
    config = with_recipe(config)
    gathering = Gathering()
    records, inputs = gathering.read(read_records, config), gathering.read(Inputs.read, config)
    gathering.finish()
    assert records is not None and inputs is not None
    sources = (record.data_source for record in (*records.train, *records.test))
    gathering.read(require_parts, inputs.rewards, sources, all_known=not config.data.streaming)
    loader = gathering.read(training_prompts, config, records, inputs.tokenizer, inputs.model.vocab_size)
    held_out = gathering.read(held_out_prompts, config, records, inputs.tokenizer, inputs.model.vocab_size)
    pretraining = gathering.read(_pretraining, config, records, inputs)
    gathering.finish()
    assert loader is not None and held_out is not None
    return partial(_run, inputs, records, loader, held_out, pretraining)


def _pretraining(config: Config, records: RunData, inputs: Inputs) -> RowLoader[SftExample] | None:
    """Prompts and right answers of the training data, for algorithm.safe.pretrain_coef."""
    safe = config.algorithm.safe
    if safe.pretrain_coef == 0:
        return None
    return training_pairs(config, records, inputs.tokenizer, inputs.model.vocab_size, safe.pretrain_batch_size)


def _run(inputs: Inputs, records: RunData, loader: RowLoader[TokenisedPrompt], held_out: tuple[TokenisedPrompt, ...],
         pretraining: RowLoader[SftExample] | None) -> None:
    config = inputs.config
    with (closing(World.from_env(config.train.timeout_s)) as world,
          closing(RLTrainer(inputs, world, pretraining=pretraining)) as trainer):
        require_same_data(world, records)
        title = f"{config.algorithm.name.value}, world size {world.size}"
        whole = Run(config, world, title, config.train.total_steps)
        for sentence in (algorithm_line(config), *trainer.batch_lines(), layout_table(config, world.size),
                         activation_line(config, world.size, trainer.model),
                         loader.counts.sentence(loader.num_rows, "prompts")):
            if sentence is not None:
                whole.view.say(sentence)
        evaluator = None if config.evaluation.every_steps is None else trainer.evaluator(held_out)
        for _ in range(trainer.steps_ahead):
            trainer.start(next(loader))
        whole.fit(RunParts(
            step=lambda: trainer.step(next(loader), loader.__next__) | data_metrics(loader), export=trainer.export,
            trace=trainer.trace, timer=trainer.timer, labels=trainer.labels(),
            evaluate=evaluator, answers=lambda: answer_lines(evaluator.answers) if evaluator else [],
            samples=lambda: trainer.samples(config.logging.samples),
            trouble=lambda: trainer.trouble,
        ))
