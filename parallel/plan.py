"""TransferPlan: which boxes go from which rank to which, to fill every destination box without a redundant byte.

Pure planning. Every rank works out its own part from the two shard maps alone; `transfer` carries it out. Which regions
there are is `cells`', who sends them is `routes`'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.cells import Cell, Kind, Owners, disjoint, divided, find_cells, in_turns
from hybridflow.parallel.nodes import ONE_NODE, Nodes
from hybridflow.parallel.routes import Edge, Routes, Turn, Wanting
from hybridflow.parallel.shard_map import ShardMap


@dataclass(frozen=True, slots=True)
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


class TransferPlan:
    """Copies that fill every shard of a destination map from a source map.

    Per rank the elements received equal the lower bound: those of its destination boxes that it does not hold itself.
    They come from a rank of the same node if one has them; else they enter the node once and are passed on inside it.
    Equal holders send equally much. Where the demanders are no holders of anything, they pass on between nodes too, so
    that a few holders are no funnel.

    A rank's part is worked out when it is asked for, and nobody else's: what is made for all ranks at once is an index
    of cells, whose size is that of the distinct boxes. Where the source map is divided, that is an index of the whole
    one, and of its cells only those that the rank holds a part of or wants are divided.

    Example: tp2 -> tp1 dp2 of an 8 x 6 matrix: each of the two ranks receives the 4 x 6 half that the other holds.
    """

    def __init__(self, src: ShardMap, dst: ShardMap, nodes: Nodes = ONE_NODE, *, passing: bool = True) -> None:
        """Plan `src` -> `dst`.

        Args:
            passing: whether demanders may pass on what they have got. Without it, and on one node, all is sent at once
                by those who hold it.
        Raises:
            ValueError: canonical shapes differ, or a destination box that no rank holds (all are listed).
        """
        self.src, self.dst, self.nodes, self._passing = src, dst, nodes, passing
        self._by_rank: dict[int, tuple[Copy, ...]] = {}
        self._wishes: dict[frozenset[Kind], _Wish] = {}
        self._whole = src if src.division is None else src.division.whole
        regions: dict[tuple[tuple[Kind, ...], tuple[Kind, ...]], list[Cell]] = defaultdict(list)
        for cell in find_cells(self._whole, dst):
            regions[tuple(cell.holders), tuple(cell.wanters)].append(cell)
        self._regions = [_Region(holders, wanters, cells) for (holders, wanters), cells in regions.items()]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of either map, ascending."""
        return tuple(sorted({*self.src.ranks, *self.dst.ranks}))

    @property
    def copies(self) -> tuple[Copy, ...]:
        """The copies of all ranks, each once: for small worlds and for tests."""
        return tuple(copy for rank in self.dst.ranks for copy in self.of_rank(rank) if copy.dest == rank)

    def of_rank(self, rank: int) -> tuple[Copy, ...]:
        """The copies that `rank` sends, receives or keeps.

        Both ends of a wire list its copies of a hop in the same order: that of the sender's shards.
        """
        if rank not in self._by_rank:
            placed = [found for region in self._regions if self._concerns(region, rank)
                      for group in self._groups(region) for found in group.copies(rank)]
            placed.sort(key=lambda each: (each[0].hop, each[1], each[0].box.name, each[0].box.lo))
            self._by_rank[rank] = tuple(copy for copy, _ in placed)
        return self._by_rank[rank]

    def received_numel(self, rank: int) -> int:
        """Elements that cross a wire to `rank`."""
        return sum(c.box.numel for c in self.of_rank(rank) if c.dest == rank != c.source)

    def sent_numel(self, rank: int) -> int:
        """Elements that cross a wire from `rank`."""
        return sum(c.box.numel for c in self.of_rank(rank) if c.source == rank != c.dest)

    def wires(self, rank: int) -> set[tuple[int, int]]:
        """(source, destination) of every wire that ends at `rank`: one for each direction and peer."""
        return {(c.source, c.dest) for c in self.of_rank(rank) if c.source != c.dest}

    def _concerns(self, region: _Region, rank: int) -> bool:
        """Whether `rank` may hold some of the region, or wants it."""
        return (rank in self.src and self._whole.kind_by_rank[rank] in region.holders
                or rank in self.dst and self.dst.kind_by_rank[rank] in region.wanters)

    def _groups(self, region: _Region) -> list[_Group]:
        if region.groups is None:
            wish = self._wishes.setdefault(frozenset(region.wanters),
                                           _Wish(region.wanters, self.src, self.dst, self.nodes, self._passing))
            cells = region.cells if self.src.division is None else divided(region.cells, self.src.division)
            by_holders: dict[tuple[Kind, ...], list[Cell]] = defaultdict(list)
            for cell in cells:
                by_holders[tuple(cell.holders)].append(cell)
            region.groups = [_Group(holders, cells, wish) for holders, cells in by_holders.items()]
        return region.groups


@dataclass
class _Region:
    """All cells that the same kinds hold and the same kinds want, where the source map is not divided yet.

    Attributes:
        groups: of the cells, divided; None as long as nobody has asked for them.
    """

    holders: tuple[Kind, ...]
    wanters: tuple[Kind, ...]
    cells: list[Cell]
    groups: list[_Group] | None = None


class _Wish:
    """What the same kinds want, whoever holds it."""

    def __init__(self, wanters: tuple[Kind, ...], src: ShardMap, dst: ShardMap, nodes: Nodes, passing: bool) -> None:
        self._wanters, self.src, self.dst, self.nodes, self._passing = wanters, src, dst, nodes, passing

    @cached_property
    def ranks(self) -> frozenset[int]:
        return frozenset(rank for kind in self._wanters for rank in self.dst.kinds[kind])

    def routes(self, holders: frozenset[int]) -> Routes | None:
        """From these holders; None where nobody else wants it."""
        if self.ranks <= holders:
            return None
        passing = self._passing and not any(self.src.shards(rank) for rank in self._in_source if rank not in holders)
        return Routes(holders, self._wanting, self.nodes, passing=passing)

    @cached_property
    def _wanting(self) -> Wanting:
        return Wanting(self.ranks, self.nodes)

    @cached_property
    def _in_source(self) -> list[int]:
        return [rank for rank in self.ranks if rank in self.src]


class _Group:
    """All cells that the same kinds hold and the same kinds want: they have their routes in common."""

    def __init__(self, holders: tuple[Kind, ...], cells: list[Cell], wish: _Wish) -> None:
        self._cells, self._wish = cells, wish
        self._holders = frozenset(rank for kind in holders for rank in wish.src.kinds[kind])

    def copies(self, rank: int) -> Iterator[tuple[Copy, tuple[int, int]]]:
        """The copies that `rank` takes part in, each with the place of its source's shard in the source's list."""
        holds, wants = rank in self._holders, rank in self._wish.ranks
        if holds and wants:
            for cell in self._cells:
                yield self._copy(cell, Edge(rank, rank, 0))
        if (holds or wants) and self._routes is not None:
            for turn, cells in self._turns.items():
                for edge in self._routes.edges(rank, turn):
                    for cell in cells:
                        yield self._copy(cell, edge)

    def _copy(self, cell: Cell, edge: Edge) -> tuple[Copy, tuple[int, int]]:
        wanters, kinds = cell.wanters, self._wish.dst.kind_by_rank
        if edge.hop == 0:
            source = cell.holders[self._wish.src.kind_by_rank[edge.source]][0]
        else:
            source = wanters[kinds[edge.source]][0]
        shards = tuple(placed.shard for placed in wanters[kinds[edge.dest]])
        return Copy(edge.source, edge.dest, cell.box, source.shard, shards, edge.hop), source.place

    @cached_property
    def _routes(self) -> Routes | None:
        return self._wish.routes(self._holders)

    @cached_property
    def _turns(self) -> dict[Turn, list[Cell]]:
        assert self._routes is not None
        turns: dict[Turn, list[Cell]] = defaultdict(list)
        for turn, cell in in_turns(self._cells, self._routes.num_turns):
            turns[turn].append(cell)
        return turns


def lower_bound_numel(src: ShardMap, dst: ShardMap, rank: int) -> int:
    """Elements of the destination boxes of `rank` that it does not hold in `src`: no plan can receive fewer."""
    total, held = 0, defaultdict(set)
    for shard in src.shards(rank):
        held[shard.box.name].add(shard.box)
    for box in _without_overlaps({shard.box for shard in dst.shards(rank)}):
        missing = [box]
        for mine in held[box.name]:
            missing = [rest for part in missing for rest in part.subtract(mine)]
        total += sum(part.numel for part in missing)
    return total


def _without_overlaps(boxes: set[Box]) -> list[Box]:
    """Disjoint boxes that cover the same."""
    by_name: dict[str, dict[Box, Owners]] = defaultdict(dict)
    for box in boxes:
        by_name[box.name][box] = {}
    return [piece.box for named in by_name.values() for piece in disjoint(named)]
