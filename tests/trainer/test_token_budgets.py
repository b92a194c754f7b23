"""Whole steps, of reinforcement learning and supervised, under budgets of tokens: those of one process by rows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from hybridflow.data.sft import SftExample
from hybridflow.parallel.world import World
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.supervised import SupervisedTrainer
from tests.ranks import run_ranks
from tests.trainer.runs import VOCAB, make_tokenizer, run_steps, tiny_config

TIMES = ("time/", "perf/", "reshard/", "train/reduced")
ROWS = ("train.micro_batch_size=4",)
BUDGET = ("train.micro_batch_size=null", "train.micro_batch_tokens=108")  # a row may have 100 + 6
CUTS = [
    ("train.micro_batch_size=null", "train.micro_batch_tokens=250", "train.forward_micro_batch_tokens=500",
     "train.layout.tp=2", "train.layout.sequence_parallel=true", "model.critic.layout={pp: 4}"),
    (*BUDGET, "train.layout.cp=2", "train.layout.pp=2", "generation.layout.tp=2"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(TIMES) and "gap" not in name}


def rl_steps(world: World, tokenizer: Path, folder: Path, cut: tuple[str, ...]) -> tuple:
    return run_steps(world, tiny_config(tokenizer, folder, cut), 2)


def test_reinforcement_learning_does_not_depend_on_the_budget(tokenizer: Path, tmp_path: Path):
    alone, answers = rl_steps(World.single(torch.device("cpu")), tokenizer, tmp_path, ROWS)
    assert alone[0]["policy/grad_norm"] > 0
    for cut in CUTS:
        ranks = run_ranks(4, rl_steps, tokenizer, tmp_path, cut)
        for step in range(2):
            assert {row: ids for _, rows in ranks for row, ids in rows[step].items()} == answers[step], cut
            for metrics, _ in ranks:
                assert numbers(metrics[step]) == pytest.approx(numbers(alone[step]), rel=1e-8, abs=1e-10), cut


def test_one_update_per_rollout_has_ratio_one_under_budgets(tokenizer: Path, tmp_path: Path):
    """Case 6, with other micro-batches for scoring than for training."""
    keys = (*BUDGET, "train.forward_micro_batch_tokens=2000", "train.global_batch_size=18")
    metrics, _ = rl_steps(World.single(torch.device("cpu")), tokenizer, tmp_path, keys)
    for step in metrics:
        assert step["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-15)
        assert step["policy/approx_kl"] == 0.0 and step["policy/clip_fraction"] == 0.0


def sft_steps(world: World, tokenizer: Path, folder: Path, cut: tuple[str, ...]) -> list[dict[str, float]]:
    draw = random.Random(3)
    ids = lambda most: tuple(draw.randrange(VOCAB) for _ in range(draw.randint(1, most)))  # noqa: E731
    config = tiny_config(tokenizer, folder, ("algorithm.kl={where: none, coef: 0.01}", *cut))
    trainer = SupervisedTrainer(Inputs.read(config, scores=False), world)
    steps = [[SftExample(row, ids(90), ids(6)) for row in range(rows)] for rows in (10, 2)]
    metrics = [trainer.step(examples) for examples in steps]
    trainer.close()
    return metrics


def test_supervised_training_does_not_depend_on_the_budget(tokenizer: Path, tmp_path: Path):
    alone = sft_steps(World.single(torch.device("cpu")), tokenizer, tmp_path, ROWS)
    assert alone[0]["sft/grad_norm"] > 0
    for cut in CUTS:
        sft = tuple(key for key in cut if "forward" not in key and "critic" not in key)
        for metrics in run_ranks(4, sft_steps, tokenizer, tmp_path, sft):
            for step in range(2):
                assert numbers(metrics[step]) == pytest.approx(numbers(alone[step]), rel=1e-8), cut
