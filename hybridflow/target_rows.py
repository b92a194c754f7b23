"""Which row each target of a micro-batch belongs to: what a loss needs that looks at whole rows.

Owns sums over rows, also where context ranks have parts of them. It knows no process group: who adds up is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def whole(sums: Tensor) -> Tensor:
    """Rows that lie here as a whole have nothing to be added."""
    return sums


@dataclass(frozen=True)
class TargetRows:
    """Rows of a micro-batch. Example: targets of rows of 2, 0 and 1 tokens have `index` [0, 0, 2] and `count` 3.

    Attributes:
        index: `[targets]` int64, the row of each target that is here, counted within the micro-batch.
        count: rows, those without targets here included.
        add_parts: sums `[rows]` over the ranks that have parts of these rows, with its gradient; collective.
        counts_here: whether a loss of one term a row counts its terms on this rank. Of the ranks that have parts of the
            same rows it is the first one.
    """

    index: Tensor
    count: int
    add_parts: Callable[[Tensor], Tensor] = whole
    counts_here: bool = True

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | None = None) -> TargetRows:
        """Of whole rows with so many targets each."""
        rows = torch.arange(len(lengths), device=device)
        counts = torch.tensor(lengths, dtype=torch.int64, device=device)
        return cls(torch.repeat_interleave(rows, counts, output_size=sum(lengths)), len(lengths))

    def sums(self, x: Tensor) -> Tensor:
        """`[rows]`: the sum of each row's targets of x `[targets]`, on all parts together; 0 where a row has none.
        Differentiable. Ranks that have parts of the same rows call it alike.
        """
        return self.add_parts(x.new_zeros(self.count).index_add(0, self.index, x))

    def means(self, x: Tensor, mask: Tensor) -> Tensor:
        """`[rows]`: the mean over the targets whose mask `[targets]` is not 0; 0 where a row has none."""
        kept = (mask != 0).to(x.dtype)
        return self.sums(torch.where(mask != 0, x, 0.0)) / self.sums(kept).clamp(min=1.0)

    def of_rows(self, x: Tensor) -> Tensor:
        """`[rows]`: of x `[targets]`, which is the same on all targets of a row, that number; 0 where a row has none.
        Sums as wide as `x` has rounding in them, so that numbers to be kept are fp64.
        """
        return self.means(x, torch.ones_like(x))

    def to_targets(self, row_values: Tensor) -> Tensor:
        """`[targets]`: each row's value of row_values `[rows]` on all of its targets that are here. Differentiable."""
        return row_values[self.index]
