"""A matrix that lies in tiles, some of them in memory that belongs to others, and what generation computes with it.

Owns products and look-ups on tiles. It never copies a weight and never differentiates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridflow.parallel.share import Alias, TilePlace


@dataclass(frozen=True)
class Tile:
    """Some rows and columns of a matrix `[out, in]`.

    Attributes:
        weight: `[rows, columns]`, any strides.
        outputs: which rows of the matrix its rows are, range after range.
        inputs: which columns of the matrix its columns are.
    Example: own heads of a fused `[q; k; v]` are one tile of three ranges: `((0, 16), (32, 40), (48, 56))`.
    """

    weight: Tensor
    outputs: tuple[tuple[int, int], ...]
    inputs: tuple[int, int]


class Tiles:
    """The weight `[out, in]` of a linear layer, an embedding or a head, as tiles that cover it once.

    Tiles of the same columns make all its rows: their products are put in order by one copy of what came out. Those of
    different columns add up.
    """

    def __init__(self, tiles: Sequence[Tile]) -> None:
        columns: dict[tuple[int, int], list[Tile]] = defaultdict(list)
        for tile in tiles:
            columns[tile.inputs].append(tile)
        self._blocks = [_Block(group) for _, group in sorted(columns.items())]
        self.shape = torch.Size((self._blocks[0].rows, self._blocks[-1].inputs.stop))
        assert all(block.rows == self.shape[0] for block in self._blocks), [block.rows for block in self._blocks]
        assert sum(block.inputs.stop - block.inputs.start for block in self._blocks) == self.shape[1]

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """y = x W^T + b, `[tokens, in] -> [tokens, out]`."""
        first, *others = self._blocks
        if not others:
            y = first.rows_by(lambda weight: F.linear(x, weight))
        else:
            y = first.rows_by(lambda weight: F.linear(x[:, first.inputs], weight))
        for block in others:
            block.add_product(y, x[:, block.inputs])
        return y if bias is None else y.add_(bias)

    def rows_by(self, product: Callable[[Tensor], Tensor]) -> Tensor:
        """`[tokens, out]` of a `product` of some whole rows `[rows, in]` that gives `[tokens, rows]`, called for each
        tile."""
        block, = self._blocks
        return block.rows_by(product)

    def embedding(self, ids: Tensor) -> Tensor:
        """Rows of the matrix: `[tokens]` int64 in `[0, out)` -> `[tokens, in]`."""
        block, = self._blocks
        found: Tensor | None = None
        for tile in block.tiles:
            row, here = _rows_in(tile, ids)
            part = F.embedding(row, tile.weight)
            found = part if found is None else torch.where(here[:, None], part, found)
        return found


class _Block:
    """Tiles of the same columns: all rows of the matrix, in the order of `pieces`."""

    def __init__(self, tiles: Sequence[Tile]) -> None:
        self.tiles = tiles
        self.inputs = slice(*tiles[0].inputs)
        self.weights = [tile.weight for tile in tiles]
        pieces = sorted((lo, hi, i, start) for i, tile in enumerate(tiles) for (lo, hi), start in _ranges(tile))
        self.pieces = [(i, start, hi - lo) for lo, hi, i, start in pieces]
        self.rows = pieces[-1][1]
        ends = [0, *(hi for _, hi, _, _ in pieces)]
        assert all(lo == end for (lo, _, _, _), end in zip(pieces, ends)), f"rows {pieces} are not covered once"

    def rows_by(self, product: Callable[[Tensor], Tensor]) -> Tensor:
        parts = [product(weight) for weight in self.weights]
        if len(self.pieces) == 1:
            return parts[0]
        return torch.cat([parts[i].narrow(1, start, size) for i, start, size in self.pieces], dim=1)

    def add_product(self, y: Tensor, x: Tensor) -> None:
        """y += x W^T."""
        if len(self.pieces) == 1:
            y.addmm_(x, self.weights[0].T)
        else:
            y += self.rows_by(lambda weight: F.linear(x, weight))


def tiles_at(places: Sequence[TilePlace], storages: Mapping[str, Tensor]) -> Tiles | Tensor:
    """The matrix that lies at `places` of `storages`; one tile is the matrix itself, a view."""
    tiles = [Tile(_view(storages[place.storage], place.offset, place.shape, (place.row_stride, 1)), place.outputs,
                  place.inputs) for place in places]
    if len(tiles) == 1 and len(tiles[0].outputs) == 1:
        return tiles[0].weight
    return Tiles(tiles)


def vector_at(place: Alias, storages: Mapping[str, Tensor]) -> Tensor:
    """The vector `[size]` that lies at `place`, a view."""
    return _view(storages[place.storage], place.offset, (place.size,), (1,))


def _view(storage: Tensor, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    return storage.as_strided(shape, strides, storage.storage_offset() + offset)


def _ranges(tile: Tile) -> Iterator[tuple[tuple[int, int], int]]:
    """Each range of the matrix's rows, and the tile's row that it starts at."""
    start = 0
    for lo, hi in tile.outputs:
        yield (lo, hi), start
        start += hi - lo


def _rows_in(tile: Tile, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The tile's row of each id, 0 for those that lie elsewhere, and which are here."""
    row, here = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for (lo, hi), start in _ranges(tile):
        mine = (ids >= lo) & (ids < hi)
        row = torch.where(mine, ids - (lo - start), row)
        here |= mine
    return row, here
