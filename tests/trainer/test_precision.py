"""Whole steps in 16 bits: near fp32, and with a loss scale that finds its place."""

from pathlib import Path

import pytest
import torch

from hybridflow.observe.metric_names import check_names
from hybridflow.parallel.world import World
from tests.ranks import run_ranks
from tests.trainer.runs import make_tokenizer, run_steps, tiny_config

LAYOUT = ("train.layout={tp: 1, pp: 2, vpp: 2}", "train.schedule=zb-v", "train.zero_stage=2")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def first_steps(world: World, tokenizer: Path, folder: Path, overrides: tuple[str, ...], steps: int) -> list[dict]:
    return run_steps(world, tiny_config(tokenizer, folder, overrides), steps)[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_are_near_fp32(precision: str, tokenizer: Path, tmp_path: Path):
    """The first step's norms, on whatever each samples: these differ in a few tokens at most."""
    world = World.single(torch.device("cpu"))
    [wide] = first_steps(world, tokenizer, tmp_path, ("train.mixed_precision=no",), 1)
    keys = (f"train.mixed_precision={precision}", "generation.max_new_tokens=6")
    for metrics in ([first_steps(world, tokenizer, tmp_path, keys, 1)]
                    + run_ranks(4, first_steps, tokenizer, tmp_path, (*keys, *LAYOUT), 1)):
        check_names(metrics[0])
        for name in ("policy/grad_norm", "critic/grad_norm", "critic/loss"):
            assert metrics[0][name] == pytest.approx(wide[name], rel=0.05), name
        assert ("policy/loss_scale" in metrics[0]) == (precision == "fp16")


def test_a_loss_scale_finds_its_place(tokenizer: Path, tmp_path: Path):
    """With a window of one it grows until a step overflows, which is skipped, and then falls; both ways are walked."""
    keys = ("train.mixed_precision=fp16", "train.loss_scale=4194304.0", "train.loss_scale_window=1",
            "train.optimizer.lr=1e-4", *LAYOUT)
    for steps in run_ranks(4, first_steps, tokenizer, tmp_path, keys, 3):
        updates = 3 * 2 * 2  # steps, updates of a step, roles
        assert 0 < steps[2]["train/skipped_steps"] < updates
        assert all(torch.isfinite(torch.tensor(step["policy/loss"])) for step in steps)


def test_steps_that_are_never_finite_end_the_run(tokenizer: Path, tmp_path: Path):
    keys = ("train.mixed_precision=fp16", "train.loss_scale=4294967296.0", "train.max_nonfinite_steps=2")
    with pytest.raises(FloatingPointError, match="3 optimizer steps in a row"):
        first_steps(World.single(torch.device("cpu")), tokenizer, tmp_path, keys, 3)
