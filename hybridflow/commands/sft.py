"""`hybridflow sft`: supervised training from a config, on all ranks; makes the tokenizer first where it is missing."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

from hybridflow.commands.job import Job
from hybridflow.config.batch_math import layout_table, sft_line
from hybridflow.config.command import Command
from hybridflow.config.schema import Config
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.records import prompt_text
from hybridflow.data.row_source import RowLoader
from hybridflow.data.sft import SftExample
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.data.train_source import data_metrics
from hybridflow.parallel.world import World
from hybridflow.trainer.activations import activation_line
from hybridflow.trainer.evaluate import answer_lines
from hybridflow.trainer.inputs import Inputs, chat_format
from hybridflow.trainer.prompts import RunData, held_out_prompts, read_records, require_same_data, training_pairs
from hybridflow.trainer.run import Run, RunParts
from hybridflow.trainer.supervised import SupervisedTrainer


def prepare(config: Config) -> Job:
    """Read everything that the config names; the job then trains, evaluates and exports, on all launched ranks."""
    records = read_records(config)
    inputs = Inputs.read(config, _new_tokenizer(config, records), scores=config.evaluation.every_steps is not None)
    vocab_size = inputs.model.vocab_size
    loader = training_pairs(config, records, inputs.tokenizer, vocab_size)
    held_out = held_out_prompts(config, records, inputs.tokenizer, vocab_size)
    return partial(_run, inputs, records, loader, held_out)


def _run(inputs: Inputs, records: RunData, loader: RowLoader[SftExample], held_out: tuple[TokenisedPrompt, ...]
         ) -> None:
    config = inputs.config
    with closing(World.from_env(config.train.timeout_s)) as world, closing(SupervisedTrainer(inputs, world)) as trainer:
        require_same_data(world, records)
        whole = Run(config, world, f"supervised training, world size {world.size}", config.sft.steps)
        if world.rank == 0 and _makes_tokenizer(config):
            inputs.tokenizer.save(Path(config.model.tokenizer).parent)
        whole.view.say(sft_line(config, world.size))
        whole.view.say(layout_table(config, world.size, Command.SFT))
        whole.view.say(activation_line(config, world.size, trainer.model, command=Command.SFT))
        if (sentence := loader.counts.sentence(loader.num_rows, "pairs")) is not None:
            whole.view.say(sentence)
        evaluator = None if config.evaluation.every_steps is None else trainer.evaluator(held_out)
        whole.fit(RunParts(
            step=lambda: trainer.step(next(loader)) | data_metrics(loader), export=trainer.export,
            trace=trainer.trace, timer=trainer.timer,
            labels={rank: trainer.actor.blueprint.grid.coord(rank).words() for rank in range(world.size)},
            stop_at_accuracy=config.sft.stop_at_accuracy,
            evaluate=evaluator, answers=lambda: answer_lines(evaluator.answers) if evaluator else [],
        ))


def _makes_tokenizer(config: Config) -> bool:
    path = config.model.tokenizer
    return path is not None and config.sft.tokenizer_vocab_size is not None and not Path(path).exists()


def _new_tokenizer(config: Config, records: RunData) -> Tokenizer | None:
    """A sentencepiece tokenizer trained on the data where the configured one is missing, alike on every rank."""
    if not _makes_tokenizer(config):
        return None
    from hybridflow.data.sentencepiece_tokenizer import train_sentencepiece

    lines = [line for record in records.train for line in (prompt_text(record.prompt), record.ground_truth)]
    return train_sentencepiece(lines, config.sft.tokenizer_vocab_size, chat=chat_format(config))
