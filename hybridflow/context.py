"""How the ranks of a context group share packed rows: which positions each has. Pure; never touches a token's data.

Each row is cut into 2 n nearly equal pieces for n ranks, in order, and rank r has pieces r and 2n-1-r. A later query
sees more keys, so an early and a late piece together make equal causal work on every rank (Llama 3, arXiv 2407.21783,
section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from hybridflow.parallel.arithmetic import round_up


@dataclass(frozen=True)
class ContextPart:
    """The part of every row that rank `index` of a context group of `size` ranks has."""

    size: int = 1
    index: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.size, self


WHOLE = ContextPart()


@dataclass(frozen=True)
class ContextCut:
    """The cut of packed rows over `size` ranks; rows may be shorter than their number of pieces.

    Example: `ContextCut((8, 3), 2).bounds == ((0, 2, 4, 6, 8), (0, 1, 2, 3, 3))`.

    Attributes:
        lengths: tokens of each row, without any padding.
    """

    lengths: tuple[int, ...]
    size: int

    @cached_property
    def bounds(self) -> tuple[tuple[int, ...], ...]:
        """For each row where its pieces begin and end: piece j is `[bounds[j], bounds[j + 1])` of the row.

        What a row has beyond equal pieces goes to its pieces one token each, in turn, and the next row begins where the
        turn stopped. Over all rows the tokens of two ranks then differ by one at most, whatever the lengths.
        """
        pieces, turn, bounds = 2 * self.size, 0, []
        for length in self.lengths:
            each, extra = divmod(length, pieces)
            sizes = (each + ((piece - turn) % pieces < extra) for piece in range(pieces))
            bounds.append((0, *accumulate(sizes)))
            turn = (turn + extra) % pieces
        return tuple(bounds)

    def pieces(self, index: int) -> tuple[tuple[range, range], ...]:
        """For each row the positions in that row of rank `index`: its early and its late piece, either maybe empty."""
        late = 2 * self.size - 1 - index
        return tuple((range(row[index], row[index + 1]), range(row[late], row[late + 1])) for row in self.bounds)

    def tokens(self, index: int) -> Tensor:
        """`[tokens of rank index]` packed positions, in its order: row after row, early piece before late piece."""
        starts = (0, *accumulate(self.lengths))
        spans = [torch.arange(start + piece.start, start + piece.stop)
                 for start, row in zip(starts, self.pieces(index)) for piece in row]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)

    def places(self) -> tuple[Tensor, Tensor]:
        """For each packed position `[tokens of all rows]` the rank that has it, and its place there."""
        owner, place = torch.empty(2, sum(self.lengths), dtype=torch.int64)
        for index in range(self.size):
            tokens = self.tokens(index)
            owner[tokens], place[tokens] = index, torch.arange(tokens.numel())
        return owner, place

    def tokens_per_rank(self, multiple_of: int) -> int:
        """The same number on every rank, a multiple of `multiple_of` and at least that: the rest is padding."""
        most = max(sum(len(early) + len(late) for early, late in self.pieces(index)) for index in range(self.size))
        return round_up(max(1, most), multiple_of)
