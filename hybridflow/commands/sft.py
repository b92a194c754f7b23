"""`hybridflow sft`: supervised training from a config, on all ranks; makes the tokenizer first where it is missing."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from hybridflow.config.batch_math import sft_line
from hybridflow.config.schema import Config
from hybridflow.data.records import DataSplit, prompt_text
from hybridflow.data.sft import SftLoader, sft_pairs
from hybridflow.data.token_rows import Overlong
from hybridflow.data.tokenizer import Tokenizer, open_tokenizer
from hybridflow.parallel.world import World
from hybridflow.trainer.prompts import held_out_prompts, read_records
from hybridflow.trainer.run import Run, RunParts
from hybridflow.trainer.supervised import SupervisedTrainer


def run(config: Config) -> None:
    """Train, evaluate and export as `config` says. Collective over the launched ranks."""
    with closing(World.from_env(config.train.timeout_s)) as world:
        _run(config, world)


def _run(config: Config, world: World) -> None:
    records = read_records(config, world)
    tokenizer = _tokenizer(config, records, world)
    whole = Run(config, world, f"supervised training, world size {world.size}", config.sft.steps)
    with closing(SupervisedTrainer(config, world, tokenizer)) as trainer:
        _fit(trainer, whole, records)


def _fit(trainer: SupervisedTrainer, whole: Run, records: DataSplit) -> None:
    config, tokenizer = trainer.config, trainer.tokenizer
    loader = SftLoader(sft_pairs(records.train), tokenizer, config.train.global_batch_size, config.train.seed,
                       config.data.shuffle, config.data.max_prompt_length + config.generation.max_new_tokens,
                       Overlong(config.data.overlong.value), trainer.model.vocab_size)
    whole.view.say(sft_line(config, trainer.world.size))
    if loader.num_dropped:
        whole.view.say(f"{loader.num_dropped} of {len(records.train)} pairs are too long and were dropped.")
    held_out = held_out_prompts(config, records, tokenizer, trainer.model.vocab_size)
    whole.fit(RunParts(
        step=lambda: trainer.step(next(loader)), export=trainer.export, trace=trainer.trace, timer=trainer.timer,
        grid=trainer.actor.engine.mesh.grid, stop_at_accuracy=config.sft.stop_at_accuracy,
        evaluate=None if config.evaluation.every_steps is None else trainer.evaluator(held_out),
    ))


def _tokenizer(config: Config, records: DataSplit, world: World) -> Tokenizer:
    """The configured tokenizer; if its file is missing and a size given, rank 0 trains a sentencepiece one first."""
    path = Path(config.model.tokenizer or config.model.path)
    if not path.exists() and config.sft.tokenizer_vocab_size is not None and world.rank == 0:
        from hybridflow.data.sentencepiece_tokenizer import train_sentencepiece

        lines = [line for record in records.train for line in (prompt_text(record.prompt), record.ground_truth)]
        train_sentencepiece(lines, path.parent, config.sft.tokenizer_vocab_size)
    world.barrier()
    return open_tokenizer(path)
