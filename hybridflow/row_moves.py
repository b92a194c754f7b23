"""Moving ragged rows between ranks, by the same planner as weights: point-to-point, and each entry once.

Owns the shard map of rows and what is on its way. What a row holds is its callers' to say (`batch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.flight import Flight
from hybridflow.parallel.plan import TransferPlan
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.world import World

# For each rank of the world the rows it holds, in the order it keeps them.
RowsOfRank = tuple[tuple[int, ...], ...]


def row_map(lengths: Sequence[int], rows_of: RowsOfRank, width: int) -> ShardMap:
    """A shard map of the canonical `[sum(lengths), width]` table whose rows lie one after another.

    Neighbouring rows that a rank keeps in order are one box.
    """
    starts = [0, *accumulate(lengths)]

    def shards_of(rank: int) -> list[Shard]:
        shards, place = [], 0
        for first, last in _runs(rows_of[rank]):
            box = Box("rows", (starts[first], 0), (starts[last + 1], width))
            if box.numel:
                shards.append(Shard(box, "rows", place * width, (width, 1)))
            place += starts[last + 1] - starts[first]
        return shards
    return ShardMap({"rows": (starts[-1], width)}, tuple(range(len(rows_of))), shards_of)


class Arrival:
    """Rows on their way to this rank. Example: `send_rows(world, lengths, src, dst, values).wait()`."""

    def __init__(self, flight: Flight, rows: Tensor) -> None:
        self._flight, self._rows = flight, rows

    def wait(self) -> Tensor:
        """`[entries of my dst rows, width]`, once they are here. May be asked again."""
        self._flight.land()
        return self._rows


def send_rows(world: World, lengths: Sequence[int], src: RowsOfRank, dst: RowsOfRank, values: Tensor) -> Arrival:
    """Start to move ragged rows from the ranks `src` to the ranks `dst`. Every rank calls it, and none waits here.

    Args:
        lengths: entries of every row of the batch.
        values: `[entries of my src rows, width]`; ranks without rows give `[0, width]`. Not to be changed any more.
    """
    width = values.shape[1]
    plan = TransferPlan(row_map(lengths, src, width), row_map(lengths, dst, width), passing=False)
    out = values.new_empty(sum(lengths[row] for row in dst[world.rank]), width)
    return Arrival(Flight(plan, world, {"rows": values.contiguous()}, {"rows": out}, wire_dtype=values.dtype), out)


def move_rows(world: World, lengths: Sequence[int], src: RowsOfRank, dst: RowsOfRank, values: Tensor) -> Tensor:
    """As `send_rows`, and wait: `[entries of my dst rows, width]`."""
    return send_rows(world, lengths, src, dst, values).wait()


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal runs of consecutive row numbers as (first, last)."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] + 1 == row:
            runs[-1] = (runs[-1][0], row)
        else:
            runs.append((row, row))
    return runs
