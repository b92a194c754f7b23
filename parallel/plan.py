"""TransferPlan: which boxes go from which rank to which, to fill every destination box without a redundant byte.

Pure planning. Every rank computes the same plan from the two shard maps alone; `transfer` carries it out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.shard_map import ShardMap


@dataclass(frozen=True)
class Copy:
    """`box` goes from where `source` keeps it to every place where `dest` wants it (source == dest: no wire).

    Attributes:
        src_shard: where the source has it: in a storage of the source map at hop 0; later in one of its own destination
            storages, which it got in an earlier hop and passes on.
    """

    source: int
    dest: int
    box: Box
    src_shard: Shard
    dst_shards: tuple[Shard, ...]
    hop: int = 0


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
        holders = {name: _RowIndex(boxes) for name, boxes in _holders(src).items()}
        nothing = _RowIndex({})
        sent: Counter[int] = Counter()
        copies: list[Copy] = []
        lost: list[str] = []
        for rank in dst.ranks:
            for box, shards in _places(dst, rank).items():
                found, missing = _sources(box, rank, holders.get(box.name, nothing), sent)
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
    total, held = 0, defaultdict(set)
    for shard in src.shards(rank):
        held[shard.box.name].add(shard.box)
    for box in {shard.box for shard in dst.shards(rank)}:
        missing = [box]
        for mine in held[box.name]:
            missing = [rest for part in missing for rest in part.subtract(mine)]
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


@dataclass(frozen=True)
class _Held:
    """A distinct source box, the ranks that hold it with their shards, and its place among those of its tensor."""

    place: int
    box: Box
    ranks: dict[int, Shard]


class _RowIndex:
    """The distinct source boxes of one tensor, found by their extent along the first dim.

    Boxes are dealt to lanes in which no two share a row, so that each lane is sorted by both ends. A table of whole
    rows that are held once has one lane; a tensor cut by columns has one for each cut.
    """

    def __init__(self, boxes: dict[Box, dict[int, Shard]]) -> None:
        self.lanes: list[tuple[list[int], list[_Held]]] = []  # ends along the first dim, and boxes
        held = [_Held(place, box, ranks) for place, (box, ranks) in enumerate(boxes.items())]
        for each in sorted(held, key=lambda each: each.box.lo[0]):
            lane = next((lane for lane in self.lanes if lane[0][-1] <= each.box.lo[0]), None)
            if lane is None:
                self.lanes.append(lane := ([], []))
            lane[0].append(each.box.hi[0])
            lane[1].append(each)

    def near(self, box: Box, rank: int) -> list[_Held]:
        """The boxes that share rows with `box`, those that `rank` holds first, else in the order of the source map."""
        found: list[_Held] = []
        for ends, lane in self.lanes:
            first = bisect_right(ends, box.lo[0])
            last = first
            while last < len(lane) and lane[last].box.lo[0] < box.hi[0]:
                last += 1
            found += lane[first:last]
        return sorted(found, key=lambda each: (rank not in each.ranks, each.place))


def _sources(box: Box, rank: int, held: _RowIndex,
             sent: Counter[int]) -> tuple[list[tuple[int, Box, Shard]], list[Box]]:
    """Cover `box` by parts of source boxes, what `rank` holds itself first; also what stays uncovered."""
    parts, missing = _cover(box, held.near(box, rank), len(held.lanes) == 1)
    found: list[tuple[int, Box, Shard]] = []
    for each, part in parts:
        source = rank if rank in each.ranks else min(each.ranks, key=lambda r: (sent[r], abs(r - rank), r))
        sent[source] += part.numel * (source != rank)
        found.append((source, part, each.ranks[source]))
    return found, missing


def _cover(box: Box, near: list[_Held], disjoint: bool) -> tuple[list[tuple[_Held, Box]], list[Box]]:
    """Parts of `box`, each with the first of `near` that has it, and what none has.

    Peeling one source box after another off what is left is quadratic in their number. Where they are known to be
    `disjoint` and cover the box, each gives its whole intersection.
    """
    if disjoint:
        parts = [(each, part) for each in near if (part := box.intersect(each.box)) is not None]
        if sum(part.numel for _, part in parts) == box.numel:
            return parts, []
    parts, missing = [], [box]
    for each in near:
        parts += [(each, common) for part in missing if (common := part.intersect(each.box)) is not None]
        missing = [rest for part in missing for rest in part.subtract(each.box)]
    return parts, missing
