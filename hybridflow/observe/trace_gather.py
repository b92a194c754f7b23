"""Bringing every rank's trace to rank 0, on one clock.

Owns the exchange. Events travel as JSON bytes, point to point, never as pickles.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridflow.observe.trace import Trace, TraceCategory, TraceEvent
from hybridflow.parallel.world import World

# Ranks leave a barrier at slightly different times. The median over several barriers drops the odd late one.
NUM_MARKS = 9


def gather_events(world: World, trace: Trace) -> dict[int, list[TraceEvent]] | None:
    """All ranks' events by rank, in rank 0's clock; None on the other ranks. A collective call.

    Hosts do not share a clock, so every rank notes the time just after the same barriers, and rank 0 takes the median
    difference as the other rank's offset. Lanes are aligned to about the time a barrier takes.
    """
    mine = RankEvents(_barrier_marks(world), trace.events)
    if world.rank > 0:
        _send(world, encode(mine))
        return None
    by_rank = {0: trace.events}
    for rank in range(1, world.size):
        theirs = decode(_receive(world, rank))
        by_rank[rank] = shifted(theirs.events, clock_offset_ns(mine.marks_ns, theirs.marks_ns))
    return by_rank


@dataclass(frozen=True)
class RankEvents:
    """What one rank sends. `marks_ns` are its clock just after each shared barrier.

    Example: `RankEvents((10, 20), [TraceEvent("F 0", TraceCategory.PIPELINE, 12, 5)])`.
    """

    marks_ns: tuple[int, ...]
    events: list[TraceEvent]


def clock_offset_ns(mine_ns: tuple[int, ...], theirs_ns: tuple[int, ...]) -> int:
    """What to add to their times to get mine. Example: `clock_offset_ns((100, 200), (40, 140)) == 60`."""
    return round(statistics.median(m - t for m, t in zip(mine_ns, theirs_ns, strict=True)))


def shifted(events: list[TraceEvent], offset_ns: int) -> list[TraceEvent]:
    """The same events, `offset_ns` later."""
    return [event._replace(start_ns=event.start_ns + offset_ns) for event in events]


def encode(rank_events: RankEvents) -> bytes:
    """JSON of one rank's marks and events; `decode` is its inverse."""
    rows = [[name, category.value, start, duration] for name, category, start, duration in rank_events.events]
    return json.dumps([rank_events.marks_ns, rows]).encode()


def decode(payload: bytes) -> RankEvents:
    """The inverse of `encode`."""
    marks, rows = json.loads(payload)
    return RankEvents(tuple(marks), [TraceEvent(n, TraceCategory(c), start, length) for n, c, start, length in rows])


def _barrier_marks(world: World) -> tuple[int, ...]:
    marks = []
    for _ in range(NUM_MARKS):
        world.barrier()
        marks.append(time.perf_counter_ns())
    return tuple(marks)


def _send(world: World, payload: bytes) -> None:
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(world.device)
    dist.send(torch.tensor([data.numel()], device=world.device), dst=0, group=world.everyone)
    dist.send(data, dst=0, group=world.everyone)


def _receive(world: World, rank: int) -> bytes:
    length = torch.empty(1, dtype=torch.int64, device=world.device)
    dist.recv(length, src=rank, group=world.everyone)
    data = torch.empty(int(length.item()), dtype=torch.uint8, device=world.device)
    dist.recv(data, src=rank, group=world.everyone)
    return data.cpu().numpy().tobytes()
