"""`hybridflow sft`: supervised training from a config, on all ranks; makes the tokenizer first where it is missing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hybridflow.commands.job import Job
from hybridflow.commands.offline import Course, run_course
from hybridflow.config.command import Command
from hybridflow.config.schema import Config
from hybridflow.data.records import DataSplit, fingerprint, prompt_text
from hybridflow.data.sft import SftLoader, sft_pairs
from hybridflow.data.token_rows import Overlong
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.prompts import held_out_prompts, read_records
from hybridflow.trainer.supervised import SupervisedTrainer


def prepare(config: Config) -> Job:
    """Read everything that the config names; the job then trains, evaluates and exports, on all launched ranks."""
    records = read_records(config)
    inputs = Inputs.read(config, _new_tokenizer(config, records), scores=config.evaluation.every_steps is not None)
    vocab_size = inputs.model.vocab_size
    loader = SftLoader(sft_pairs(records.train), inputs.tokenizer, config.train.global_batch_size, config.train.seed,
                       config.data.shuffle, config.data.max_prompt_length + config.generation.max_new_tokens,
                       Overlong(config.data.overlong.value), vocab_size)
    dropped = f"{loader.num_dropped} of {len(records.train)} pairs are too long and were dropped."
    return partial(run_course, Course(
        Command.SFT, "supervised training", inputs, config.sft.steps, fingerprint((*records.train, *records.test)),
        loader, SupervisedTrainer, held_out_prompts(config, records, inputs.tokenizer, vocab_size),
        notes=(dropped,) if loader.num_dropped else (), before=partial(_save_tokenizer, inputs),
        stop_at_accuracy=config.sft.stop_at_accuracy))


def _save_tokenizer(inputs: Inputs) -> None:
    if _makes_tokenizer(inputs.config):
        inputs.tokenizer.save(Path(inputs.config.model.tokenizer).parent)


def _makes_tokenizer(config: Config) -> bool:
    path = config.model.tokenizer
    return path is not None and config.sft.tokenizer_vocab_size is not None and not Path(path).exists()


def _new_tokenizer(config: Config, records: DataSplit) -> Tokenizer | None:
    """A sentencepiece tokenizer trained on the data where the configured one is missing, alike on every rank."""
    if not _makes_tokenizer(config):
        return None
    from hybridflow.data.sentencepiece_tokenizer import train_sentencepiece

    lines = [line for record in records.train for line in (prompt_text(record.prompt), record.ground_truth)]
    return train_sentencepiece(lines, config.sft.tokenizer_vocab_size)
