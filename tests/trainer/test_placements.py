"""The same algorithm on other ranks: rollouts, losses and gradient norms do not depend on which ranks a role has."""

from pathlib import Path

import pytest
import torch

from hybridflow.parallel.world import World
from tests.ranks import run_ranks
from tests.trainer.runs import make_tokenizer
from tests.trainer.test_rl import numbers, steps_on

SPLIT = "placement={actor: 0-1, reference: 0-1, critic: 2-3}"
PLACEMENTS = {
    "colocate": ("train.layout={tp: 2, pp: 2}",),
    "split": (SPLIT, "train.layout.tp=2", "model.critic.layout.pp=2", "generation.layout.tp=1"),
    "split, sharded": (SPLIT, "train.layout.pp=2", "model.critic.layout={tp: 1, cp: 2}", "train.zero_stage=2",
                       "generation.layout.tp=2", "train.offload.roles=true"),
    "standalone": ("placement={actor: '0', generation: '1', critic: '2', reference: '3'}",),
    "generation apart": ("placement={actor: 0-1, generation: 2-3, critic: 0-1, reference: 2-3}", "train.layout.tp=2",
                         "generation.layout.pp=2", "generation.reshard_check=all"),
    "generation on more ranks": ("placement={actor: 1-2, critic: 0-3}", "train.layout.pp=2",
                                 "model.critic.layout={tp: 2, pp: 2}", "placement.generation=0-3",
                                 "generation.balance=shared"),
    "backwards": ("placement={actor: 2-3, generation: '3', critic: 0-1, reference: '2'}",),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_every_placement_takes_the_step_of_one_process(tokenizer: Path, tmp_path: Path):
    alone, answers = steps_on(World.single(torch.device("cpu")), tokenizer, tmp_path, (), 2)
    assert alone[0]["policy/grad_norm"] > 0 and alone[0]["critic/grad_norm"] > 0
    for name, placement in PLACEMENTS.items():
        ranks = run_ranks(4, steps_on, tokenizer, tmp_path, placement, 2)
        for step in range(2):
            assert {row: ids for _, rows in ranks for row, ids in rows[step].items()} == answers[step], name
            for metrics, _ in ranks:
                assert numbers(metrics[step]) == pytest.approx(numbers(alone[step]), rel=1e-8, abs=1e-10), name
                assert metrics[step]["policy/log_prob_gap_max"] < 1e-12
