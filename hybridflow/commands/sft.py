"""`hybridflow sft`: supervised training from a config, on all ranks; makes the tokenizer first where it is missing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hybridflow.commands.job import Job
from hybridflow.commands.offline import Course, run_course
from hybridflow.config.command import Command
from hybridflow.config.schema import Config
from hybridflow.data.records import prompt_text
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.gathering import Gathering
from hybridflow.trainer.inputs import Inputs, chat_format
from hybridflow.trainer.prompts import RunData, held_out_prompts, read_records, training_pairs
from hybridflow.trainer.rewards.inputs import require_parts
from hybridflow.trainer.supervised import SupervisedTrainer


def prepare(config: Config) -> Job:
    """Read everything that the config names; the job then trains, evaluates and exports, on all launched ranks."""
    gathering = Gathering()
    records = gathering.read(read_records, config)
    scores = config.evaluation.every_steps is not None
    if records is None and _makes_tokenizer(config):
        gathering.finish()
    inputs = gathering.read(Inputs.read, config, _new_tokenizer(config, records), scores=scores)
    gathering.finish()
    assert records is not None and inputs is not None
    require_parts(inputs.rewards, (record.data_source for record in records.test))
    vocab_size = inputs.model.vocab_size
    loader = training_pairs(config, records, inputs.tokenizer, vocab_size)
    return partial(run_course, Course(
        Command.SFT, "supervised training", inputs, config.sft.steps, records.mark(), loader, SupervisedTrainer,
        held_out_prompts(config, records, inputs.tokenizer, vocab_size), unit="pairs",
        before=partial(_save_tokenizer, inputs), stop_at_accuracy=config.sft.stop_at_accuracy))


def _save_tokenizer(inputs: Inputs) -> None:
    if _makes_tokenizer(inputs.config):
        inputs.tokenizer.save(Path(inputs.config.model.tokenizer).parent)


def _makes_tokenizer(config: Config) -> bool:
    path = config.model.tokenizer
    return path is not None and config.sft.tokenizer_vocab_size is not None and not Path(path).exists()


def _new_tokenizer(config: Config, records: RunData | None) -> Tokenizer | None:
    """A sentencepiece tokenizer trained on the data where the configured one is missing, alike on every rank."""
    if not _makes_tokenizer(config):
        return None
    assert records is not None, "of data that cannot be read there is no tokenizer"
    from hybridflow.data.sentencepiece_tokenizer import train_sentencepiece

    lines = [line for record in records.train for line in (prompt_text(record.prompt), record.ground_truth)]
    return train_sentencepiece(lines, config.sft.tokenizer_vocab_size, chat=chat_format(config))
