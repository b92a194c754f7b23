"""The running rows' counters in one tensor, so that a step costs one addition and a change of rows one gather.

Owns no decision: which rows enter and leave is the engine's.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RowTable:
    """Columns of int64 `[rows]`, in the order of the caches' rows.

    Attributes:
        requests: index of the request that the row answers.
        keys: the row's random stream.
        tokens: the newest token, not in the cache yet.
        positions: the place of `tokens` in the sequence (what rotary positions are made from).
        counts: tokens sampled so far.
    """

    def __init__(self, table: Tensor) -> None:
        """`table`: `[5, rows]`, in the order of the attributes."""
        self._table = table
        self.requests, self.keys, self.tokens, self.positions, self.counts = table.unbind(0)

    def __len__(self) -> int:
        return self._table.shape[1]

    @classmethod
    def empty(cls, device: torch.device) -> RowTable:
        return cls(torch.empty(5, 0, dtype=torch.int64, device=device))

    @classmethod
    def first(cls, requests: Tensor, keys: Tensor, last_positions: Tensor) -> RowTable:
        """Rows after their prefill. `keys`: one per request; `last_positions` `[rows]`: of the prompts' last tokens."""
        nothing = torch.zeros_like(requests)
        return cls(torch.stack([requests, keys[requests], nothing, last_positions, nothing]))

    @classmethod
    def join(cls, one: RowTable, other: RowTable) -> RowTable:
        return cls(torch.cat([one._table, other._table], 1))

    def advance(self, tokens: Tensor) -> None:
        """Every row has sampled one more token."""
        self.tokens.copy_(tokens)
        self._table[3:] += 1

    def select(self, places: Tensor) -> RowTable:
        """The rows at `places`, in that order."""
        return RowTable(self._table[:, places])
