"""A tiny run shared by the trainer tests: a random model on sums, its config and its trainer on any world."""

from __future__ import annotations

from pathlib import Path

from hybridflow.config.load import load_config
from hybridflow.config.schema import Config
from hybridflow.data.loader import PromptLoader
from hybridflow.data.sentencepiece_tokenizer import train_sentencepiece
from hybridflow.parallel.world import World
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.prompts import read_records, training_prompts
from hybridflow.trainer.rl import RLTrainer

VOCAB = 273


def make_tokenizer(folder: Path) -> Path:
    """A tokenizer of digits and bytes."""
    train_sentencepiece([f"{a} + {b} = {a + b}" for a in range(30) for b in range(30)], VOCAB).save(folder)
    return folder / "tokenizer.model"


def tiny_config(tokenizer: Path, folder: Path, overrides: tuple[str, ...] = ()) -> Config:
    """Six prompts with three samples a step, two optimizer steps; everything in fp64."""
    tree = {
        "model": {"tokenizer": str(tokenizer), "spec": {
            "hidden_size": 32, "intermediate_size": 48, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2,
            "max_position_embeddings": 128}},
        "train": {"total_steps": 2, "global_batch_size": 10, "micro_batch_size": 4, "mixed_precision": "fp64",
                  "optimizer": {"lr": 1e-2}},
        "generation": {"samples_per_prompt": 3, "max_new_tokens": 6, "temperature": 0.8},
        "algorithm": {"kl": {"where": "reward", "coef": 0.1}, "entropy_coef": 0.01},
        "data": {"tasks": [{"name": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "max_digits": 1,
                                                            "min_digits": 1}}],
                 "size": 64, "test_size": 8, "prompts_per_step": 6, "max_prompt_length": 100},
        "reward": {"function": f"{Path(__file__).with_name('reward_of_length.py')}:score"},
        "logging": {"dir": str(folder)},
    }
    return load_config(tree, overrides)


def started(world: World, config: Config) -> tuple[RLTrainer, PromptLoader]:
    """A trainer and its prompts."""
    trainer = RLTrainer(Inputs.read(config), world)
    return trainer, training_prompts(config, read_records(config), trainer.tokenizer, trainer.model.vocab_size)


def run_steps(world: World, config: Config, steps: int) -> tuple[list[dict[str, float]], list[list[tuple[int, ...]]]]:
    """Metrics and responses (in row order, those at home here) of `steps` steps."""
    trainer, loader = started(world, config)
    metrics, responses = [], []
    for _ in range(steps):
        metrics.append(trainer.step(next(loader), loader.__next__))
        responses.append({row: sample.response
                          for row, sample in zip(trainer.batch.home[world.rank], trainer.batch.samples)})
    trainer.close()
    return metrics, responses
