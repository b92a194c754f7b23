"""ShardMap: for every rank, which boxes it holds and where. Pure metadata, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property

from hybridflow.parallel.box import Shard


def _alone(rank: int) -> Hashable:
    return rank


@dataclass(frozen=True)
class ShardMap:
    """Canonical shapes, and a function from a rank to the shards it holds.

    Ranks of one kind hold the same shards: replicas differ in their ranks only. `shards_of` is called once for each
    kind that is asked about (with any rank of it), so that a map over many ranks costs little.

    Args:
        kind_of: the kind of a rank; by default every rank is of its own.
    Example: `ShardMap({"w": (8, 6)}, (0, 1), lambda r: [Shard.of_rows(Box("w", (4*r, 0), (4*r+4, 6)), "w")])`.
    """

    shapes: dict[str, tuple[int, ...]]
    ranks: tuple[int, ...]
    shards_of: Callable[[int], list[Shard]]
    kind_of: Callable[[int], Hashable] = _alone
    _kept: dict[Hashable, tuple[Shard, ...]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def kinds(self) -> dict[Hashable, tuple[int, ...]]:
        """The ranks of each kind, ascending; kinds in the order of their first rank in `ranks`."""
        members: dict[Hashable, list[int]] = {}
        for rank in self.ranks:
            members.setdefault(self.kind_of(rank), []).append(rank)
        return {kind: tuple(sorted(ranks)) for kind, ranks in members.items()}

    @cached_property
    def _members(self) -> frozenset[int]:
        return frozenset(self.ranks)

    def __contains__(self, rank: int) -> bool:
        return rank in self._members

    def shards(self, rank: int) -> tuple[Shard, ...]:
        """The shards of `rank`; none for a rank outside the map."""
        if rank not in self:
            return ()
        kind = self.kind_of(rank)
        if kind not in self._kept:
            self._kept[kind] = tuple(self.shards_of(rank))
        return self._kept[kind]
