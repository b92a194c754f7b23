"""Generation weights that share memory with training weights: what a rank has lies where it is trained, and only the
rest has memory of its own.

Owns the geometry, as shard maps and as places of tiles. Pure metadata: it never holds a tensor (see `tiles`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.shard_map import ShardMap

TRAINING = "training/"  # before the name of a training storage that a destination lies in
REST = "rest/"  # before the name of a generation storage: what of it needs memory of its own, flat


@dataclass(frozen=True)
class TilePlace:
    """A tile of a matrix `[out, in]`: a 2-D view, in elements, of one storage.

    Its rows are those of the matrix in `outputs`, range after range; its columns are those in `inputs`.
    Example: rows 0-4 and 8-12 of a `[16, 6]` matrix: `TilePlace("training/w", 0, 6, ((0, 4), (8, 12)), (0, 6))`.
    """

    storage: str
    offset: int
    row_stride: int
    outputs: tuple[tuple[int, int], ...]
    inputs: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(hi - lo for lo, hi in self.outputs), self.inputs[1] - self.inputs[0]


@dataclass(frozen=True)
class Alias:
    """A vector that lies whole in one storage."""

    storage: str
    offset: int
    size: int


Place = Alias | tuple[TilePlace, ...]


def shared_map(train: ShardMap, generation: ShardMap) -> ShardMap:
    """The boxes of `generation`, each where the rank has it in training (in `TRAINING + storage`), the rest in storages
    `REST + storage` of its own.

    The rest of a matrix is cut where the columns of training are cut and every piece is contiguous there, so that it is
    received in place. A vector is in training memory as a whole, or as a whole in its own.
    """
    return _Shared(train, generation).shard_map


def tiling(train: ShardMap, generation: ShardMap, rank: int) -> dict[str, Place]:
    """For each generation storage of `rank` where its contents lie in the storages of `shared_map`.

    Tiles are as few as can be: pieces that follow each other in memory are one.
    """
    return _Shared(train, generation).tiling(rank)


def rest_shapes(train: ShardMap, generation: ShardMap, rank: int) -> dict[str, tuple[int]]:
    """The flat storages that `rank` needs beside those of training."""
    sizes: dict[str, int] = defaultdict(int)
    for shard in shared_map(train, generation).shards(rank):
        if shard.storage.startswith(REST):
            sizes[shard.storage] += shard.box.numel
    return {storage: (size,) for storage, size in sizes.items()}


def with_training(dst: ShardMap, train: ShardMap) -> ShardMap:
    """`dst` and every training shard in `TRAINING + storage`: what fills both in one plan.

    What `dst` already has in a training storage is not listed twice.
    """
    ranks = (*dst.ranks, *(rank for rank in train.ranks if rank not in dst))

    def shards_of(rank: int) -> list[Shard]:
        there: dict[tuple[str, str], list[Box]] = defaultdict(list)
        for shard in dst.shards(rank):
            there[shard.storage, shard.box.name].append(shard.box)
        shards = list(dst.shards(rank))
        for shard in train.shards(rank):
            home = _in_training(shard)
            shards += [_part(home, box) for box in _without([home.box], there[home.storage, home.box.name])]
        return shards

    return ShardMap(dst.shapes | train.shapes, ranks, shards_of, lambda rank: (_kind(dst, rank), _kind(train, rank)))


@dataclass(frozen=True)
class _Piece:
    """A part of a generation matrix: where it lies in the matrix, and where in memory."""

    outputs: tuple[int, int]
    inputs: tuple[int, int]
    shard: Shard

    @property
    def end(self) -> int:
        """One row after its last one, as an offset in the storage."""
        return self.shard.offset + self.shard.box.shape[0] * self.shard.strides[0]


class _Shared:
    def __init__(self, train: ShardMap, generation: ShardMap) -> None:
        self.train, self.generation = train, generation
        self.shard_map = ShardMap(generation.shapes, generation.ranks, self._shards,
                                  lambda rank: (_kind(train, rank), generation.kind_of(rank)))

    @cached_property
    def _column_cuts(self) -> dict[str, list[int]]:
        """Where training cuts the columns of each matrix, on any rank."""
        cuts: dict[str, set[int]] = defaultdict(set)
        for ranks in self.train.kinds.values():
            for shard in self.train.shards(ranks[0]):
                if len(shard.box.lo) == 2:
                    cuts[shard.box.name] |= {shard.box.lo[1], shard.box.hi[1]}
        return {name: sorted(places) for name, places in cuts.items()}

    def tiling(self, rank: int) -> dict[str, Place]:
        return {storage: place if isinstance(place, Alias) else _tiles(place)
                for storage, place in self._places(rank).items()}

    def _shards(self, rank: int) -> list[Shard]:
        shards = []
        wanted = self._wanted(rank)
        for storage, place in self._places(rank).items():
            if isinstance(place, Alias):
                # An alias keeps the vector's own order: only the start of the storage moves.
                shards += [replace(shard, storage=place.storage, offset=place.offset + shard.offset)
                           for shard in wanted[storage]]
            else:
                shards += [piece.shard for piece in place]
        return shards

    def _wanted(self, rank: int) -> dict[str, list[Shard]]:
        wanted: dict[str, list[Shard]] = defaultdict(list)
        for shard in self.generation.shards(rank):
            wanted[shard.storage].append(shard)
        return wanted

    def _places(self, rank: int) -> dict[str, Alias | list[_Piece]]:
        mine: dict[str, list[Shard]] = defaultdict(list)
        for shard in self.train.shards(rank):
            mine[shard.box.name].append(_in_training(shard))
        return {storage: self._matrix(shards, mine) if len(shards[0].box.lo) == 2 else _vector(shards, mine)
                for storage, shards in self._wanted(rank).items()}

    def _matrix(self, wanted: Sequence[Shard], mine: dict[str, list[Shard]]) -> list[_Piece]:
        pieces, size = [], 0
        for shard in wanted:
            rest = [shard.box]
            for home in mine[shard.box.name]:
                common = [box for box in (part.intersect(home.box) for part in rest) if box is not None]
                pieces += [_piece(shard, _part(home, box)) for box in common]
                rest = _without(rest, [home.box])
            for box in (column for part in rest for column in self._columns(part)):
                pieces.append(_piece(shard, Shard(box, f"{REST}{shard.storage}", size, (box.shape[1], 1))))
                size += box.numel
        return pieces

    def _columns(self, box: Box) -> list[Box]:
        """The box, cut where training cuts columns."""
        inside = [at for at in self._column_cuts[box.name] if box.lo[1] < at < box.hi[1]]
        if not inside:
            return [box]
        return [Box(box.name, (box.lo[0], lo), (box.hi[0], hi)) for lo, hi in pairwise([box.lo[1], *inside, box.hi[1]])]


def _vector(wanted: Sequence[Shard], mine: dict[str, list[Shard]]) -> Alias:
    """In training memory if all of it lies in one storage there, in its own order."""
    size = sum(shard.box.numel for shard in wanted)
    homes = {(home.storage, _part(home, shard.box).offset - shard.offset)
             for shard in wanted for home in mine[shard.box.name] if home.box.intersect(shard.box) == shard.box}
    covered = all(any(home.box.intersect(shard.box) == shard.box for home in mine[shard.box.name]) for shard in wanted)
    if covered and len(homes) == 1:
        (storage, offset), = homes
        return Alias(storage, offset, size)
    return Alias(f"{REST}{wanted[0].storage}", 0, size)


def _tiles(pieces: Sequence[_Piece]) -> tuple[TilePlace, ...]:
    """Pieces that follow each other in memory, joined; those in training memory first."""
    order = sorted(pieces, key=lambda piece: (piece.shard.storage.startswith(REST), piece.shard.storage,
                                              piece.shard.offset))
    runs: list[list[_Piece]] = []
    for piece in order:
        last = runs[-1][-1] if runs else None
        if last is not None and _follows(piece, last):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return tuple(TilePlace(run[0].shard.storage, run[0].shard.offset, run[0].shard.strides[0],
                           tuple(_joined(piece.outputs for piece in run)), run[0].inputs) for run in runs)


def _follows(piece: _Piece, last: _Piece) -> bool:
    return (piece.shard.storage, piece.shard.strides, piece.inputs, piece.shard.offset) == (
        last.shard.storage, last.shard.strides, last.inputs, last.end)


def _joined(ranges: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for lo, hi in ranges:
        if joined and joined[-1][1] == lo:
            joined[-1] = (joined[-1][0], hi)
        else:
            joined.append((lo, hi))
    return joined


def _piece(wanted: Shard, shard: Shard) -> _Piece:
    """The part of the generation shard `wanted` that lies at `shard`."""
    width = wanted.strides[0]  # the rows of a generation storage are whole
    assert wanted.box.shape[1] == width and wanted.strides[1] == 1, wanted
    (row, column), (rows, columns) = shard.box.lo, shard.box.shape
    output = wanted.offset // width + row - wanted.box.lo[0]
    column -= wanted.box.lo[1]
    return _Piece((output, output + rows), (column, column + columns), shard)


def _in_training(shard: Shard) -> Shard:
    return replace(shard, storage=f"{TRAINING}{shard.storage}")


def _part(home: Shard, box: Box) -> Shard:
    """Where `box`, which lies inside `home`, lies."""
    offset = sum((lo - start) * stride for lo, start, stride in zip(box.lo, home.box.lo, home.strides, strict=True))
    return Shard(box, home.storage, home.offset + offset, home.strides)


def _without(boxes: Sequence[Box], others: Sequence[Box]) -> list[Box]:
    rest = list(boxes)
    for other in others:
        rest = [part for box in rest for part in box.subtract(other)]
    return rest


def _kind(of: ShardMap, rank: int) -> Hashable:
    """None for a rank outside the map."""
    return of.kind_of(rank) if rank in of else None
