"""generation.batch_invariant in a whole run: what the trainer thinks of a rollout is what the generator thought of it,
to the last bit, on every layout and in every precision.
"""

from pathlib import Path

import pytest
import torch

from hybridflow.kernels.native_build import Unavailable, native_library
from hybridflow.parallel.world import World
from tests.ranks import run_ranks
from tests.trainer.runs import make_tokenizer, run_steps, tiny_config

AVAILABLE = native_library()
pytestmark = pytest.mark.skipif(isinstance(AVAILABLE, Unavailable), reason=str(AVAILABLE))
MODE = ("generation.batch_invariant=true", "algorithm.name=grpo",
        "algorithm.kl={where: loss, estimator: k3, coef: 0.1}")
LAYOUTS = [
    ("train.layout.tp=2", "train.layout.pp=2", "generation.layout.tp=4", "train.micro_batch_size=1"),
    ("train.layout.tp=4", "train.layout.sequence_parallel=true", "generation.layout={tp: 1, pp: 2}",
     "train.recompute=selective", "model.reference.layout={tp: 1, pp: 2}"),
    ("train.layout.pp=2", "generation.layout={tp: 2, pp: 2}", "train.forward_micro_batch_size=7",
     "train.recompute=full", "generation.max_rows=2"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def steps_on(world: World, tokenizer: Path, folder: Path, overrides: tuple[str, ...], steps: int) -> tuple:
    return run_steps(world, tiny_config(tokenizer, folder, (*MODE, *overrides)), steps)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp64"])
def test_no_gap_between_trainer_and_generator(precision: str, tokenizer: Path, tmp_path: Path):
    """Nor between the reference and the policy that has not learned yet: the first update's KL is exactly 0."""
    keys = (f"train.mixed_precision={precision}", "train.global_batch_size=18")
    world = World.single(torch.device("cpu"))
    alone, answers = steps_on(world, tokenizer, tmp_path, keys, 2)
    assert [metrics["policy/log_prob_gap_max"] for metrics in alone] == [0.0, 0.0]
    assert alone[0]["policy/kl_reference"] == 0.0 < alone[1]["policy/kl_reference"]
    for layout in LAYOUTS:
        ranks = run_ranks(4, steps_on, tokenizer, tmp_path, (*keys, *layout), 2)
        metrics, _ = ranks[0]
        assert [step["policy/log_prob_gap_max"] for step in metrics] == [0.0, 0.0], layout
        assert metrics[0]["policy/kl_reference"] == 0.0, layout
        assert {row: ids for _, rows in ranks for row, ids in rows[0].items()} == answers[0], layout
