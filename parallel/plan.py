"""TransferPlan: which boxes go from which rank to which, to fill every destination box without a redundant byte.

Pure planning. Every rank computes the same plan from the two shard maps alone; `transfer` carries it out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.shard_map import ShardMap


@dataclass(frozen=True)
class Copy:
    """`box` goes from where `source` keeps it to every place where `dest` wants it (source == dest: no wire)."""

    source: int
    dest: int
    box: Box
    src_shard: Shard
    dst_shards: tuple[Shard, ...]


@dataclass(frozen=True)
class TransferPlan:
    """Copies that fill every shard of a destination map from a source map.

    Per rank the elements received equal the lower bound: those of its destination boxes that it does not hold itself.
    Among replicas of a source box the one that has sent least so far is chosen, then the nearest rank.

    Example: tp2 -> tp1 dp2 of an 8 x 6 matrix: each of the two ranks receives the 4 x 6 half that the other holds.
    """

    copies: tuple[Copy, ...]
    _by_rank: dict[int, tuple[Copy, ...]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def between(cls, src: ShardMap, dst: ShardMap) -> TransferPlan:
        """Plan `src` -> `dst` for all ranks.

        Raises:
            ValueError: canonical shapes differ, or a destination box that no rank holds (all are listed).
        """
        _check_shapes(src, dst)
        holders = _holders(src)
        sent: Counter[int] = Counter()
        copies: list[Copy] = []
        lost: list[str] = []
        for rank in dst.ranks:
            for box, shards in _places(dst, rank).items():
                found, missing = _sources(box, rank, holders[box.name], sent)
                copies += [Copy(source, rank, part, shard, shards) for source, part, shard in found]
                lost += [f"{part.name}[{part.lo}:{part.hi}] wanted by rank {rank}" for part in missing]
        if lost:
            raise ValueError(f"no rank holds {len(lost)} destination boxes: {'; '.join(lost[:5])}")
        return cls(tuple(copies))

    def of_rank(self, rank: int) -> tuple[Copy, ...]:
        """The copies that `rank` sends, receives or keeps."""
        if rank not in self._by_rank:
            self._by_rank[rank] = tuple(c for c in self.copies if rank in (c.source, c.dest))
        return self._by_rank[rank]

    def received_numel(self, rank: int) -> int:
        """Elements that cross a wire to `rank`."""
        return sum(c.box.numel for c in self.of_rank(rank) if c.dest == rank != c.source)

    @property
    def max_peers(self) -> int:
        """The most wires (one for each direction and peer) that meet at one rank."""
        wires = {(c.source, c.dest) for c in self.copies if c.source != c.dest}
        return max(Counter(rank for wire in wires for rank in wire).values(), default=0)


def lower_bound_numel(src: ShardMap, dst: ShardMap, rank: int) -> int:
    """Elements of the destination boxes of `rank` that it does not hold in `src`: no plan can receive fewer."""
    total = 0
    for box in {shard.box for shard in dst.shards(rank)}:
        missing = [box]
        for held in {shard.box for shard in src.shards(rank)}:
            missing = [rest for part in missing for rest in part.subtract(held)]
        total += sum(part.numel for part in missing)
    return total


def _check_shapes(src: ShardMap, dst: ShardMap) -> None:
    faults = [f"{name}: {src.shapes.get(name, 'not in the source')} -> {shape}"
              for name, shape in dst.shapes.items() if src.shapes.get(name) != shape]
    if faults:
        raise ValueError(f"source and destination disagree on {len(faults)} tensors: {'; '.join(faults[:5])}")


def _holders(src: ShardMap) -> dict[str, dict[Box, dict[int, Shard]]]:
    """For each canonical tensor its distinct source boxes, and the ranks (with their shard) that hold each."""
    holders: dict[str, dict[Box, dict[int, Shard]]] = defaultdict(dict)
    for rank in src.ranks:
        for shard in src.shards(rank):
            holders[shard.box.name].setdefault(shard.box, {}).setdefault(rank, shard)
    return holders


def _places(dst: ShardMap, rank: int) -> dict[Box, tuple[Shard, ...]]:
    places: dict[Box, tuple[Shard, ...]] = {}
    for shard in dst.shards(rank):
        places[shard.box] = (*places.get(shard.box, ()), shard)
    return places


def _sources(box: Box, rank: int, holders: dict[Box, dict[int, Shard]],
             sent: Counter[int]) -> tuple[list[tuple[int, Box, Shard]], list[Box]]:
    """Cover `box` by parts of source boxes, what `rank` holds itself first; also what stays uncovered."""
    found: list[tuple[int, Box, Shard]] = []
    missing = [box]
    for source_box, ranks in sorted(holders.items(), key=lambda item: rank not in item[1]):
        if not missing:
            break
        rest: list[Box] = []
        for part in missing:
            common = part.intersect(source_box)
            rest += part.subtract(source_box)
            if common is not None:
                source = rank if rank in ranks else min(ranks, key=lambda r: (sent[r], abs(r - rank), r))
                sent[source] += common.numel * (source != rank)
                found.append((source, common, ranks[source]))
        missing = rest
    return found, missing
