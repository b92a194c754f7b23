"""Timing rivals in one run: in turns, so that whatever else the machine does meets all of them alike.

Owns what is timed and how it is summed up. Wall time is that of the slowest rank; CPU seconds are summed over ranks and
count every thread, so they say what a rival costs even where cores are shared.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hybridflow.parallel.world import World

# For each rival, for each round: (wall seconds, CPU seconds) of one rank.
Clocked = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Times:
    """Seconds of one rival over all rounds."""

    median_wall: float
    least_wall: float
    median_cpu: float
    least_cpu: float


def in_turns(world: World, rivals: Mapping[str, Callable[[], object]], rounds: int) -> Clocked:
    """Run every rival once a round, each round starting with another one. Collective."""
    names, clocked = list(rivals), {name: [] for name in rivals}
    gc.collect()
    gc.freeze()  # what is there stays: no collection, of which there is one before every run, looks at it again
    try:
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                gc.collect()  # nobody pays for the garbage of another
                world.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                rivals[name]()
                clocked[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    finally:
        gc.unfreeze()
    return clocked


def summed_up(by_rank: Sequence[Clocked]) -> dict[str, Times]:
    """The times of every rival, over ranks and rounds."""
    times = {}
    for name in by_rank[0]:
        rounds = list(zip(*(rank[name] for rank in by_rank), strict=True))
        walls = _walls(by_rank, name)
        cpus = [sum(cpu for _, cpu in ranks) for ranks in rounds]
        times[name] = Times(statistics.median(walls), min(walls), statistics.median(cpus), min(cpus))
    return times


def paired(by_rank: Sequence[Clocked], name: str, to: str) -> list[float]:
    """How many times the wall seconds of `to` rival `name` took, round by round: what a busy machine does to a whole
    round cancels out.
    """
    return [one / other for one, other in zip(_walls(by_rank, name), _walls(by_rank, to), strict=True)]


def _walls(by_rank: Sequence[Clocked], name: str) -> list[float]:
    """Wall seconds of the slowest rank in each round."""
    return [max(wall for wall, _ in ranks) for ranks in zip(*(rank[name] for rank in by_rank), strict=True)]
