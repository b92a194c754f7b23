"""Gradients that are rounded on the wire, and steps that are not finite: what every rank sees of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridflow.parallel.world import World
from tests.ranks import run_ranks
from tests.trainer.runs import make_tokenizer, run_steps, tiny_config

FP32 = ("train.mixed_precision=no", "train.global_batch_size=18")
HUGE = ("train.mixed_precision=fp16", "train.loss_scale=4294967296.0", "train.max_nonfinite_steps=1")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def first_step(world: World, tokenizer: Path, folder: Path, keys: tuple[str, ...]) -> dict[str, float]:
    return run_steps(world, tiny_config(tokenizer, folder, keys), 1)[0][0]


def test_gradients_rounded_on_the_wire_are_near(tokenizer: Path, tmp_path: Path):
    alone = first_step(World.single(torch.device("cpu")), tokenizer, tmp_path, FP32)["policy/grad_norm"]
    for metrics in run_ranks(4, first_step, tokenizer, tmp_path, (*FP32, "train.reduce_dtype=bf16")):
        assert 0 < abs(metrics["policy/grad_norm"] / alone - 1) < 0.01  # rounded, and near
    for metrics in run_ranks(4, first_step, tokenizer, tmp_path, FP32):
        assert metrics["policy/grad_norm"] == pytest.approx(alone, rel=1e-5)


def last_words(world: World, tokenizer: Path, folder: Path) -> str:
    with pytest.raises(FloatingPointError) as caught:
        run_steps(world, tiny_config(tokenizer, folder, HUGE), 2)
    return str(caught.value)


def test_too_many_steps_that_are_not_finite_end_the_run_on_every_rank(tokenizer: Path, tmp_path: Path):
    messages = run_ranks(2, last_words, tokenizer, tmp_path)
    assert len(set(messages)) == 1 and "2 optimizer steps in a row" in messages[0]
