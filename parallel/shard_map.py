"""ShardMap: for every rank, which boxes it holds and where. Pure metadata, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hybridflow.parallel.box import Shard


def _alone(rank: int) -> Hashable:
    return rank


@dataclass(frozen=True)
class Division:
    """How a map comes from one of fewer, larger shards, whose ranks have divided them among themselves.

    Attributes:
        whole: the map of the same ranks before. Ranks of one kind of the divided map are of one kind there too, and the
            ranks of a kind have between them all of its shards.
        parts_of: the parts that a shard was divided into, from a kind of `whole` and the place of the shard in its
            list: for each kind of the divided map which has some of it, its shards in the order of its list.
    """

    whole: ShardMap
    parts_of: Callable[[Hashable, int], Mapping[Hashable, Sequence[Shard]]]


@dataclass(frozen=True)
class ShardMap:
    """Canonical shapes, and a function from a rank to the shards it holds.

    Ranks of one kind hold the same shards: replicas differ in their ranks only. `shards_of` is called once for each
    kind that is asked about (with any rank of it), so that a map over many ranks costs little.

    Args:
        kind_of: the kind of a rank; by default every rank is of its own.
        division: where this is known, plans look only at the shards of others that a rank has to do with. `shards_of`
            must agree with it: a rank has its parts of the first shard of the whole map, then those of the second, ...
    Example: `ShardMap({"w": (8, 6)}, (0, 1), lambda r: [Shard.of_rows(Box("w", (4*r, 0), (4*r+4, 6)), "w")])`.
    """

    shapes: dict[str, tuple[int, ...]]
    ranks: tuple[int, ...]
    shards_of: Callable[[int], list[Shard]]
    kind_of: Callable[[int], Hashable] = _alone
    division: Division | None = None
    _kept: dict[Hashable, tuple[Shard, ...]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def kinds(self) -> dict[Hashable, tuple[int, ...]]:
        """The ranks of each kind, ascending; kinds in the order of their first rank in `ranks`."""
        members: dict[Hashable, list[int]] = {}
        for rank in self.ranks:
            members.setdefault(self.kind_of(rank), []).append(rank)
        return {kind: tuple(sorted(ranks)) for kind, ranks in members.items()}

    @cached_property
    def kind_by_rank(self) -> dict[int, Hashable]:
        """As `kind_of`, for who asks about many ranks."""
        return {rank: kind for kind, ranks in self.kinds.items() for rank in ranks}

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
