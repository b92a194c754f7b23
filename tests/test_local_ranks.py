"""Ranks of this host: results in order, and every way to fail ends all of them and says which rank it was."""

import os
import time

import pytest

from hybridflow.local_ranks import CONNECT_S, LocalRanks, RankError
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


def wait_on_one(world: World) -> None:
    if world.rank == 0:
        world.barrier()


def group_timeout(world: World) -> float:
    """Of the group of everyone."""
    [backend] = {world.everyone._get_backend(world.device)}
    return backend.options._timeout.total_seconds()


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


def test_a_silent_rank_s_stack_tells_where_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hybridflow.local_ranks.GRACE_S", 0.0)
    with LocalRanks(2, timeout_s=1) as ranks:
        with pytest.raises(RankError, match=r"rank 1 was at:\n(.|\n)*in sleep_on_one"):
            ranks.run(sleep_on_one)
        with pytest.raises(RankError, match=r"ranks \[0\](.|\n)*in barrier(.|\n)*in wait_on_one"):  # inside gloo
            ranks.run(wait_on_one)


def test_a_collective_that_waits_too_long_says_so_before_the_call_ends():
    with LocalRanks(2, timeout_s=CONNECT_S) as ranks:
        assert ranks.run(group_timeout) == [CONNECT_S, CONNECT_S]
