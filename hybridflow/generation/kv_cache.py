"""Keys and values of rows that decode in step, aligned at their ends so that every row writes at the same place.

Owns the storage: filling it from a prefill, one column a step, growth, and the removal of finished rows. It never
decides which rows run, and lives for one `generate` call: nothing is kept that could outlive its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST_RESPONSE_COLUMNS = 256  # reserved for responses at first; doubled whenever they are used up


@dataclass(frozen=True)
class CacheShape:
    """What one rank stores for a token. Example: `CacheShape(2, 4, 16, torch.float32, torch.device("cpu"))`."""

    num_layers: int
    kv_heads_per_rank: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.kv_heads_per_rank * self.head_dim * self.dtype.itemsize


class RowGroup:
    """The cache of rows that were admitted together and have prompts of similar length.

    Row r of prompt length p fills columns `start[r] = longest - p` up to `end`, the same for all rows. So a step
    writes one column, and the mask is a constant bias over the few first columns, or none where all starts are equal:

        row 0, prompt of 5    | p p p p p r r . .
        row 1, prompt of 3    | - - p p p r r . .       columns before a row's start are zero and masked
                                first       end  capacity

    Attributes:
        rows: how many rows are alive; they are the first ones of each storage.
        end: columns filled so far.
        sampled: tokens sampled for each row; `end` is one behind, the newest token is not in the cache yet.
    """

    def __init__(self, prompt_lengths: Sequence[int], copies: Sequence[int], max_new_tokens: int,
                 shape: CacheShape) -> None:
        """
        Args:
            prompt_lengths: tokens of each distinct prompt, in the order in which a prefill packs them.
            copies: how many rows each prompt has; they follow one another.
            max_new_tokens: the longest response.
        """
        lengths = torch.tensor(prompt_lengths).repeat_interleave(torch.tensor(copies))
        self.rows = len(lengths)
        self.end = int(lengths.max())
        self.sampled = 0
        self._starts = self.end - lengths  # [rows], on the host: it steers views, not arithmetic
        self._prompt_columns = self.end
        self._full = self.end + max_new_tokens - 1  # the last token of a response is never fed back
        self._capacity = min(self._full, self.end + FIRST_RESPONSE_COLUMNS)
        self._shape = shape
        size = (2, self.rows, shape.kv_heads_per_rank, self._capacity, shape.head_dim)
        self._storages = [torch.empty(size, dtype=shape.dtype, device=shape.device) for _ in range(shape.num_layers)]
        self._fill_index = self._place_prompts(prompt_lengths, copies)
        self._refresh_bias()
        if self._bias is not None:  # masked columns still meet a weight of 0, which NaN would survive
            for storage in self._storages:
                storage[:, :, :, : int(self._starts.max())] = 0

    def write_prompts(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the packed prompts, `[prompt tokens, kv_heads, head_dim]` each, once for every row of a prompt."""
        token, row, column = self._fill_index
        keys, values = self._storages[layer]
        keys[row, :, column] = k[token]
        values[row, :, column] = v[token]

    def reserve(self) -> None:
        """Make room for the column of the next step, doubling the responses' part layer by layer when it is full."""
        if self.end < self._capacity:
            return
        assert self._capacity < self._full, (self._capacity, self._full)
        grown = min(self._full, 2 * self._capacity - self._prompt_columns)
        for layer, old in enumerate(self._storages):
            size = (2, self.rows, old.shape[2], grown, old.shape[4])
            new = torch.empty(size, dtype=old.dtype, device=old.device)
            new[:, :, :, : self.end] = old[:, : self.rows, :, : self.end]
            self._storages[layer] = new
        self._capacity = grown
        self._refresh_bias()

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Write this step's column, k and v `[rows, kv_heads, head_dim]`, and return what the step attends to.

        Returns:
            keys and values, views `[rows, kv_heads, columns, head_dim]`, and the additive mask
            `[rows, 1, 1, columns]`, None where every column counts.
        """
        storage = self._storages[layer]
        storage[0, : self.rows, :, self.end] = k
        storage[1, : self.rows, :, self.end] = v
        keys, values = storage[:, : self.rows, :, self._first : self.end + 1].unbind(0)
        return keys, values, None if self._bias is None else self._bias[..., self._first : self.end + 1]

    def step(self) -> None:
        """The column that every layer has appended is now part of the past."""
        self.end += 1

    def remove(self, done: Tensor) -> Tensor:
        """Drop the rows where `done` (bool `[rows]`, on the host); the last rows move into the holes.

        Returns:
            int64 `[rows left]` on the host: the old place of each row that is left, in its new order.
        """
        survivors = (~done).nonzero().squeeze(-1)
        order = torch.arange(len(survivors))
        holes = done[: len(survivors)].nonzero().squeeze(-1)
        movers = survivors[survivors >= len(survivors)]
        order[holes] = movers
        if len(movers):
            to, source = holes.to(self._shape.device), movers.to(self._shape.device)
            for storage in self._storages:
                used = storage[:, :, :, : self.end]
                used[:, to] = used[:, source]
        self.rows = len(survivors)
        self._starts = self._starts[order]
        if self.rows:
            self._refresh_bias()
        return order

    def _place_prompts(self, prompt_lengths: Sequence[int], copies: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """For each cell to fill: its packed prompt token, its row and its column; `[cells]` each, on the device."""
        first_token = torch.tensor([0, *prompt_lengths]).cumsum(0)[:-1].repeat_interleave(torch.tensor(copies))
        lengths = self.end - self._starts
        row = torch.arange(self.rows).repeat_interleave(lengths)
        offset = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
        cells = torch.stack([first_token[row] + offset, row, self._starts[row] + offset])
        return tuple(cells.to(self._shape.device).unbind(0))

    def _refresh_bias(self) -> None:
        """The first column that anyone reads, and minus infinity before each row's start."""
        self._first = int(self._starts.min())
        self._bias = None
        if bool((self._starts != self._first).any()):
            before = torch.arange(self._capacity) < self._starts.unsqueeze(-1)
            bias = torch.zeros(before.shape, dtype=self._shape.dtype).masked_fill_(before, -torch.inf)
            self._bias = bias[:, None, None, :].to(self._shape.device)
