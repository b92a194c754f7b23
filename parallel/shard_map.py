"""ShardMap: for every rank, which boxes it holds and where. Pure metadata, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hybridflow.parallel.box import Shard


@dataclass(frozen=True)
class ShardMap:
    """Canonical shapes, and a function from a rank to the shards it holds.

    The function is called once for each rank asked about, so that a map over many ranks costs nothing until used.
    Example: `ShardMap({"w": (8, 6)}, (0, 1), lambda r: [Shard.of_rows(Box("w", (4*r, 0), (4*r+4, 6)), "w")])`.
    """

    shapes: dict[str, tuple[int, ...]]
    ranks: tuple[int, ...]
    shards_of: Callable[[int], list[Shard]]
    _kept: dict[int, tuple[Shard, ...]] = field(default_factory=dict, repr=False, compare=False)

    def shards(self, rank: int) -> tuple[Shard, ...]:
        """The shards of `rank`; none for a rank outside the map."""
        if rank not in self.ranks:
            return ()
        if rank not in self._kept:
            self._kept[rank] = tuple(self.shards_of(rank))
        return self._kept[rank]
