"""Ranks of this host: results in order, and every way to fail ends all of them and says which rank it was."""

import os
import time

import pytest

from hybridflow.local_ranks import LocalRanks, RankError
from hybridflow.parallel.world import World


def tenfold(world: World, number: int) -> int:
    return 10 * world.rank + number


def raise_on_one(world: World) -> None:
    if world.rank == 1:
        raise KeyError("planted")
    world.barrier()


def die_on_one(world: World) -> None:
    if world.rank == 1:
        os._exit(3)
    world.barrier()


def sleep_on_one(world: World) -> None:
    if world.rank == 1:
        time.sleep(600)


def test_results_come_in_order_and_a_fault_does_not_end_the_next_call():
    with LocalRanks(2, timeout_s=30) as ranks:
        assert ranks.run(tenfold, 3) == [3, 13]
        with pytest.raises(RankError, match="rank 1 of 2 raised:(.|\n)*KeyError: 'planted'"):
            ranks.run(raise_on_one)
        assert ranks.run(tenfold, 4) == [4, 14]
        with pytest.raises(RankError, match=r"rank 1 of 2 died \(exit code 3\)|rank 0 of 2 raised"):
            ranks.run(die_on_one)


def test_a_rank_without_an_answer_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hybridflow.local_ranks.GRACE_S", 0.0)
    with LocalRanks(2, timeout_s=1) as ranks, pytest.raises(RankError, match=r"ranks \[1\] of 2 gave no answer in 1 s"):
        ranks.run(sleep_on_one)
