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
from hybridflow.parallel.cells import Cell, Kind, Owners, disjoint, find_cells, in_turns
from hybridflow.parallel.nodes import ONE_NODE, Nodes
from hybridflow.parallel.routes import Edge, Routes, Turn
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


class TransferPlan:
    """Copies that fill every shard of a destination map from a source map.

    Per rank the elements received equal the lower bound: those of its destination boxes that it does not hold itself.
    They come from a rank of the same node if one has them; else they enter the node once and are passed on inside it.
    Equal holders send equally much. Where the demanders are no holders of anything, they pass on between nodes too, so
    that a few holders are no funnel.

    A rank's part is worked out when it is asked for, and nobody else's: what is made for all ranks at once is an index
    of cells, whose size is that of the distinct boxes.

    Example: tp2 -> tp1 dp2 of an 8 x 6 matrix: each of the two ranks receives the 4 x 6 half that the other holds.
    """

    def __init__(self, src: ShardMap, dst: ShardMap, nodes: Nodes = ONE_NODE) -> None:
        """Plan `src` -> `dst`.

        Raises:
            ValueError: canonical shapes differ, or a destination box that no rank holds (all are listed).
        """
        self.src, self.dst, self.nodes = src, dst, nodes
        self._by_rank: dict[int, tuple[Copy, ...]] = {}
        groups: dict[tuple[tuple[Kind, ...], tuple[Kind, ...]], list[Cell]] = defaultdict(list)
        for cell in find_cells(src, dst):
            groups[tuple(cell.holders), tuple(cell.wanters)].append(cell)
        self._groups = [_Group(holders, wanters, cells, src, dst, nodes)
                        for (holders, wanters), cells in groups.items()]

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
            placed = [found for group in self._groups for found in group.copies(rank)]
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


class _Group:
    """All cells that the same kinds hold and the same kinds want: they have their routes in common."""

    def __init__(self, holders: tuple[Kind, ...], wanters: tuple[Kind, ...], cells: list[Cell], src: ShardMap,
                 dst: ShardMap, nodes: Nodes) -> None:
        self._holders, self._wanters, self._cells = frozenset(holders), frozenset(wanters), cells
        self._src, self._dst, self._nodes = src, dst, nodes

    def copies(self, rank: int) -> Iterator[tuple[Copy, int]]:
        """The copies that `rank` takes part in, each with the place of its source's shard in the source's list."""
        holds = rank in self._src and self._src.kind_of(rank) in self._holders
        wants = rank in self._dst and self._dst.kind_of(rank) in self._wanters
        if holds and wants:
            for cell in self._cells:
                yield self._copy(cell, Edge(rank, rank, 0))
        if (holds or wants) and self._demanders:
            for turn, cells in self._turns.items():
                for edge in self._routes.edges(rank, turn):
                    for cell in cells:
                        yield self._copy(cell, edge)

    def _copy(self, cell: Cell, edge: Edge) -> tuple[Copy, int]:
        owners, shard_map = (cell.holders, self._src) if edge.hop == 0 else (cell.wanters, self._dst)
        place = owners[shard_map.kind_of(edge.source)][0]
        wanted = self._dst.shards(edge.dest)
        shards = tuple(wanted[at] for at in cell.wanters[self._dst.kind_of(edge.dest)])
        return Copy(edge.source, edge.dest, cell.box, shard_map.shards(edge.source)[place], shards, edge.hop), place

    @cached_property
    def _demanders(self) -> frozenset[int]:
        wanting = {rank for kind in self._wanters for rank in self._dst.kinds[kind]}
        return frozenset(wanting.difference(*(self._src.kinds[kind] for kind in self._holders)))

    @cached_property
    def _routes(self) -> Routes:
        holders = [rank for kind in self._holders for rank in self._src.kinds[kind]]
        return Routes(holders, self._demanders, self._nodes,
                      passing=not any(self._src.shards(rank) for rank in self._demanders))

    @cached_property
    def _turns(self) -> dict[Turn, list[Cell]]:
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
