"""Which rows of a packed micro-batch share a rectangle of attention, and where each token lies in it.

Pure planning on the host: it knows lengths, and neither queries nor devices. `attention` lays tensors out by it, and
`activation_memory` counts by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_PADDING = 0.25  # of the tokens of a rectangle
FREE_PADDING = 512  # tokens


@dataclass(frozen=True)
class Rectangle:
    """Rows of similar length, each padded on the right to `longest` slots.

    Attributes:
        rows: indices in the micro-batch, ascending.
    Example: of rows of 3, 90, and 4 tokens, `Rectangle((0, 2), 4)` holds the two short ones in 8 slots.
    """

    rows: tuple[int, ...]
    longest: int

    @property
    def slots(self) -> int:
        return len(self.rows) * self.longest


def rectangles(lengths: Sequence[int]) -> tuple[Rectangle, ...]:
    """Cut rows into rectangles of similar lengths, the longest first.

    From the longest row on, a rectangle takes the next shorter one while at most a quarter of its tokens comes on top
    as padding. The mean length is then at least 4/5 of the longest, and since a mean of squares is no less than the
    square of the mean, scores are at most (5/4)^2 = 1.56 times those of the rows alone: memory and work are both
    bounded, whatever the lengths. Rectangles are few, since each begins below 4/5 of the one before. All the rows that
    are left make one rectangle as soon as that pads no more than `FREE_PADDING` tokens: a call of attention costs more
    than they do.

    Returns:
        Rectangles of together at most `sum(lengths) * (1 + MOST_PADDING) + FREE_PADDING` slots.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    found, start, left = [], 0, sum(lengths)
    while start < len(order):
        longest = lengths[order[start]]
        end, tokens = len(order), left
        if (end - start) * longest - left > FREE_PADDING:
            end, tokens = _similar(lengths, order, start)
        found.append(Rectangle(tuple(sorted(order[start:end])), longest))
        start, left = end, left - tokens
    return tuple(found)


def _similar(lengths: Sequence[int], order: Sequence[int], start: int) -> tuple[int, int]:
    """Where the rectangle that begins with row `order[start]` ends, and its tokens."""
    longest, tokens, end = lengths[order[start]], 0, start
    while end < len(order):
        more = tokens + lengths[order[end]]
        if (end + 1 - start) * longest > more * (1 + MOST_PADDING):
            break
        tokens, end = more, end + 1
    return end, tokens


def lay_out(lengths: Sequence[int], cut: Sequence[Rectangle]) -> tuple[Tensor, Tensor]:
    """Places of tokens in the slots of all rectangles, one after another, each row after row.

    Returns:
        (tokens, slots): the token that each slot reads `[slots]`, and the slot of each token `[tokens]`. Padding reads
        the last token of its own row: what it computes is finite where the row is, and no row meets another's values.
    """
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    reads, filled = [], []
    for rectangle in cut:
        rows, place = torch.tensor(rectangle.rows), torch.arange(rectangle.longest)
        last = sizes[rows, None] - 1
        reads.append((starts[rows, None] + place.minimum(last)).flatten())
        filled.append((place <= last).flatten())
    tokens, real = torch.cat(reads), torch.cat(filled).nonzero().squeeze(1)
    return tokens, torch.empty_like(real).index_copy_(0, tokens[real], real)
