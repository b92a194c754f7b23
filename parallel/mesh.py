"""Layouts, the grid of ranks they span, and the groups that one rank belongs to.

`Layout` and `Grid` are pure metadata: any rank can work out where every other rank sits. `Mesh` adds the process
groups of this rank. Nothing here knows of models or weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from hybridflow.parallel.world import World


@dataclass(frozen=True)
class Layout:
    """Parallel degrees of one role: tensor, pipeline, data and context. Example: `Layout(tp=2, pp=2).size == 4`."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def __str__(self) -> str:
        return f"tp{self.tp} pp{self.pp} dp{self.dp}" + (f" cp{self.cp}" if self.cp > 1 else "")


@dataclass(frozen=True)
class Coord:
    """A rank's place in a grid: tensor index, data-parallel replica, pipeline stage, part of the context."""

    tp: int = 0
    dp: int = 0
    pp: int = 0
    cp: int = 0

    def words(self) -> str:
        """Example: "tp 0, cp 0, dp 1, pp 0"."""
        return f"tp {self.tp}, cp {self.cp}, dp {self.dp}, pp {self.pp}"


@dataclass(frozen=True)
class Grid:
    """Which global rank sits at which coordinate: `ranks` in coordinate order, tp fastest, then cp, dp and pp.

    With the default order tensor groups are adjacent ranks (one node) and pipeline stages are the farthest apart
    (across nodes), as in Megatron-LM. Example: `Grid.of(Layout(tp=2, pp=2)).coord(3) == Coord(tp=1, dp=0, pp=1)`.
    """

    layout: Layout
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.ranks) == self.layout.size == len(set(self.ranks)), (self.layout, self.ranks)

    @classmethod
    def of(cls, layout: Layout, ranks: Sequence[int] | None = None) -> Grid:
        """On `ranks` in this order; None for the first ones of the world."""
        return cls(layout, tuple(range(layout.size)) if ranks is None else tuple(ranks))

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    def coord(self, rank: int) -> Coord:
        place = self._places[rank]
        tp, cp, dp = self.layout.tp, self.layout.cp, self.layout.dp
        return Coord(tp=place % tp, cp=place // tp % cp, dp=place // (tp * cp) % dp, pp=place // (tp * cp * dp))

    def lines(self, key: Callable[[Coord], tuple]) -> list[tuple[int, ...]]:
        """Ranks grouped by `key` of their coordinate, groups and members in coordinate order."""
        groups: dict[tuple, list[int]] = {}
        for rank in self.ranks:
            groups.setdefault(key(self.coord(rank)), []).append(rank)
        return [tuple(group) for group in groups.values()]


@dataclass(frozen=True)
class AxisGroup:
    """Some ranks in coordinate order, and which of them I am. A group of one has no process group.

    `order[i]` is the place of member i in the process group, which torch keeps sorted by global rank.
    """

    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def order(self) -> tuple[int, ...]:
        places = {rank: place for place, rank in enumerate(sorted(self.ranks))}
        return tuple(places[rank] for rank in self.ranks)

    @cached_property
    def is_sorted(self) -> bool:
        return self.order == tuple(range(self.size))


def everyone(world: World) -> AxisGroup:
    """All ranks of the world as one group."""
    return AxisGroup(tuple(range(world.size)), world.rank, world.everyone)


def mesh_of(grid: Grid, world: World) -> Mesh | Outside:
    """This rank's mesh on `grid`, or word that it has none. Collective over the world: ranks outside of the grid make
    the groups with the others.
    """
    if world.rank in grid.ranks:
        return Mesh(grid, world)
    _make_groups(grid, world)
    return Outside(grid, world)


@dataclass(frozen=True)
class Outside:
    """What a rank that is not in `grid` knows of the mesh on it."""

    grid: Grid
    world: World

    @property
    def layout(self) -> Layout:
        return self.grid.layout

    @property
    def device(self) -> torch.device:
        return self.world.device

    def make_tp_blocks(self, size: int) -> None:
        """Make the groups of `Mesh.tp_block` with those who are in them. Collective over the world."""
        _make_lines(self.grid, self.world, _block_key(size))


class Mesh:
    """A grid together with the groups that this rank is in. Making one is a collective call over the whole world, which
    may have ranks outside of the grid (`mesh_of`).

    Attributes:
        tp, cp, pp: this rank's groups along these axes; `pp.index` is its stage.
        data: all dp x cp ranks that hold the same weights: gradients are summed over it.
        model: all tp x pp ranks that hold one copy of the weights together.
        members: all ranks of the grid.
        embedding: the first and the last stage of this pipeline; on a middle stage, or with one stage, itself alone.
        links: by (from stage, to stage) the pairs of neighbouring stages of this pipeline, in a ring, that this rank is
            one of. A message travels on the link of its direction, so that nothing queues behind a message that goes
            elsewhere.
    """

    def __init__(self, grid: Grid, world: World) -> None:
        assert world.rank in grid.ranks, (grid, world.rank)
        self.grid = grid
        self.world = world
        self.coord = grid.coord(world.rank)
        _make_groups(grid, world)
        self.tp, self.cp, self.pp, self.data, self.model, self.embedding = (
            self._axis(axis) for axis in _axes(grid.layout))
        self.links = {ends: self._group(ranks, purpose) for ranks, purpose, ends in _link_lines(grid)
                      if world.rank in ranks}

    @property
    def layout(self) -> Layout:
        return self.grid.layout

    @property
    def device(self) -> torch.device:
        return self.world.device

    @cached_property
    def members(self) -> AxisGroup:
        return everyone(self.world) if self.layout.size == self.world.size else self._group(self.grid.ranks)

    @property
    def is_first_stage(self) -> bool:
        return self.coord.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coord.pp == self.layout.pp - 1

    def tp_block(self, size: int) -> AxisGroup:
        """My block of `size` adjacent tensor coordinates (the ranks that replicate one key-value head). Collective."""
        assert self.layout.tp % size == 0, (self.layout, size)
        _make_lines(self.grid, self.world, _block_key(size))
        return self._axis(_Axis(_block_key(size)))

    def _axis(self, axis: _Axis) -> AxisGroup:
        mine = axis.key(self.coord)
        return self._group(tuple(rank for rank in self.grid.ranks if axis.key(self.grid.coord(rank)) == mine),
                           axis.purpose)

    def _group(self, ranks: tuple[int, ...], purpose: str = "") -> AxisGroup:
        """One that has been made."""
        return AxisGroup(ranks, ranks.index(self.world.rank), self.world.group(ranks, purpose))


@dataclass(frozen=True)
class _Axis:
    """Ranks with an equal key are a group; `purpose` keeps it apart from another of the same ranks."""

    key: Callable[[Coord], tuple]
    purpose: str = ""


def _axes(layout: Layout) -> tuple[_Axis, ...]:
    """tp, cp, pp, data, model and embedding."""
    last = layout.pp - 1
    return (
        _Axis(lambda c: (c.cp, c.dp, c.pp)),
        _Axis(lambda c: (c.tp, c.dp, c.pp)),
        _Axis(lambda c: (c.tp, c.cp, c.dp)),
        # Of its own even where these are the ranks of cp: keys and values must not queue behind a gradient bucket.
        _Axis(lambda c: (c.tp, c.pp), "data"),
        _Axis(lambda c: (c.cp, c.dp)),
        _Axis(lambda c: (c.tp, c.cp, c.dp, 0 if c.pp in (0, last) else c.pp)),
    )


def _block_key(size: int) -> Callable[[Coord], tuple]:
    return lambda c: (c.tp // size, c.cp, c.dp, c.pp)


def _link_lines(grid: Grid) -> Iterator[tuple[tuple[int, int], str, tuple[int, int]]]:
    """The two ranks of every link, its purpose, and the stages from which and to which it leads."""
    pp = grid.layout.pp
    for line in grid.lines(lambda c: (c.tp, c.cp, c.dp)):
        for ends in sorted({(s, (s + hop) % pp) for s in range(pp) for hop in (1, pp - 1) if pp > 1}):
            yield (line[ends[0]], line[ends[1]]), f"link {ends[0]} to {ends[1]}", ends


def _make_groups(grid: Grid, world: World) -> None:
    """Every group of a mesh on `grid`, in the same order on every rank of the world, which is collective."""
    for axis in _axes(grid.layout):
        _make_lines(grid, world, axis.key, axis.purpose)
    for ranks, purpose, _ in _link_lines(grid):
        world.group(ranks, purpose)
    if grid.layout.size < world.size:
        world.group(grid.ranks)


def _make_lines(grid: Grid, world: World, key: Callable[[Coord], tuple], purpose: str = "") -> None:
    for ranks in grid.lines(key):
        world.group(ranks, purpose)
