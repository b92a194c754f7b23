"""Precisions that round: near fp32 where they work, and skipped, counted and ended where a gradient is not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridflow.parallel.world import World
from tests.ranks import run_ranks
from tests.trainer.runs import make_tokenizer, run_steps, tiny_config

ONE_UPDATE = "train.global_batch_size=18"
NEAR = [
    ("train.mixed_precision=no", "train.reduce_dtype=bf16"),
    ("train.mixed_precision=bf16", "train.layout={tp: 2}"),
    ("train.mixed_precision=fp16", "train.zero_stage=2", "train.loss_scale=1024"),
]
HUGE = ("train.mixed_precision=fp16", "train.loss_scale=1e12", ONE_UPDATE)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def steps_on(world: World, tokenizer: Path, folder: Path, keys: tuple[str, ...], steps: int) -> tuple:
    return run_steps(world, tiny_config(tokenizer, folder, keys), steps)


@pytest.mark.parametrize("keys", NEAR)
def test_a_step_is_near_that_of_fp32(keys: tuple[str, ...], tokenizer: Path, tmp_path: Path):
    fp32 = ("train.mixed_precision=no", ONE_UPDATE)
    [alone], answers = steps_on(World.single(torch.device("cpu")), tokenizer, tmp_path, fp32, 1)
    ranks = run_ranks(4, steps_on, tokenizer, tmp_path, (*keys, ONE_UPDATE), 1)
    same = {row: ids for _, rows in ranks for row, ids in rows[0].items()} == answers[0]
    assert same or keys[0] != fp32[0]
    for [metrics], _ in ranks:
        assert metrics["train/skipped_steps"] == 0 and metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
        if same:  # else a token was drawn across a rounding of its probability, and the rollouts are others
            assert metrics["policy/grad_norm"] == pytest.approx(alone["policy/grad_norm"], rel=0.01)
            assert metrics["critic/loss"] == pytest.approx(alone["critic/loss"], rel=0.01)


def test_a_loss_scale_that_is_too_large_skips_steps_until_it_fits(tokenizer: Path, tmp_path: Path):
    metrics, _ = steps_on(World.single(torch.device("cpu")), tokenizer, tmp_path, HUGE, 2)
    assert [step["train/skipped_steps"] for step in metrics] == [2.0, 4.0]  # of actor and critic


def last_words(world: World, tokenizer: Path, folder: Path) -> str:
    try:
        steps_on(world, tokenizer, folder, (*HUGE, "train.max_nonfinite_steps=1"), 2)
    except FloatingPointError as error:
        return str(error)
    return ""


def test_too_many_steps_that_are_not_finite_end_the_run_on_every_rank(tokenizer: Path, tmp_path: Path):
    messages = run_ranks(2, last_words, tokenizer, tmp_path)
    assert len(set(messages)) == 1 and messages[0]
