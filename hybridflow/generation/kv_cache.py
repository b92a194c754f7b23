"""Keys and values of rows that decode together, aligned at their ends so that every row writes at the same place.

Owns the storage: filling it from a prefill, one column a step, growth, merging, and the removal of finished rows. It
never decides which rows run, and lives for one `generate` call: nothing is kept that could outlive its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_GROWTH = 256  # columns; a cache starts with this many for its responses


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


@dataclass(frozen=True)
class PromptCells:
    """Where packed prompts go: for each cell to fill its packed token, its row and its column, int64 `[cells]` each."""

    token: Tensor
    row: Tensor
    column: Tensor


class RowGroup:
    """The cache of rows that attend in one call.

    A row of n cached tokens fills columns `end - n` up to `end`, so a step writes the same column for all rows, and
    the mask is a constant bias over the few first columns, or none where all rows are equally long:

        row 0, prompt of 5    | p p p p p r r . .
        row 1, prompt of 3    | - - p p p r r . .       columns before a row's start are masked
                                first         end

    Attributes:
        rows: how many rows are alive; they are the first ones of each storage.
        end: columns filled so far.
        sampled: int64 `[rows]` on the host, tokens sampled for each row. The newest of them is not in the cache yet.
    """

    def __init__(self, lengths: Tensor, sampled: Tensor, max_new_tokens: int, shape: CacheShape) -> None:
        """
        Args:
            lengths: int64 `[rows]` on the host, tokens of each row that are about to be filled in.
            sampled: int64 `[rows]` on the host.
            max_new_tokens: the longest response.
        """
        self.rows, self.end, self.sampled = len(lengths), int(lengths.max()), sampled
        self._starts = self.end - lengths  # on the host: it steers views, not arithmetic
        self._shape, self._max_new_tokens = shape, max_new_tokens
        self._capacity = self.end
        self._capacity = self._wanted_capacity()
        self._storages = [self._new_storage() for _ in range(shape.num_layers)]
        self._refresh_bias()
        if self._bias is not None:  # masked columns still meet a weight of 0, which NaN would survive
            for storage in self._storages:
                storage[:, :, :, : int(self._starts.max())] = 0

    @classmethod
    def of_prompts(cls, prompt_lengths: Sequence[int], copies: Sequence[int], max_new_tokens: int,
                   shape: CacheShape) -> RowGroup:
        """`copies[i]` rows for the i-th distinct prompt, one after another."""
        lengths = torch.tensor(prompt_lengths).repeat_interleave(torch.tensor(copies))
        return cls(lengths, torch.zeros_like(lengths), max_new_tokens, shape)

    @classmethod
    def merged(cls, one: RowGroup, other: RowGroup) -> RowGroup:
        """The rows of `one` and then of `other`, in new storage without their dead rows and columns."""
        lengths = torch.cat([one.end - one._starts, other.end - other._starts])
        sampled = torch.cat([one.sampled, other.sampled])
        group = cls(lengths, sampled, one._max_new_tokens, one._shape)
        for part, rows in ((one, slice(0, one.rows)), (other, slice(one.rows, None))):
            for new, old in zip(group._storages, part._storages, strict=True):
                new[:, rows, :, group.end - part.columns : group.end] = old[:, : part.rows, :, part._first : part.end]
        return group

    @property
    def columns(self) -> int:
        """Tokens of the longest row: what each row costs to attend to."""
        return self.end - self._first

    def prompt_cells(self, prompt_lengths: Sequence[int], copies: Sequence[int]) -> PromptCells:
        """The cells of prompts packed in the order of `of_prompts`."""
        first_token = torch.tensor([0, *prompt_lengths]).cumsum(0)[:-1].repeat_interleave(torch.tensor(copies))
        lengths = self.end - self._starts
        row = torch.arange(self.rows).repeat_interleave(lengths)
        offset = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
        cells = torch.stack([first_token[row] + offset, row, self._starts[row] + offset])
        return PromptCells(*cells.to(self._shape.device))

    def write_prompts(self, layer: int, cells: PromptCells, k: Tensor, v: Tensor) -> None:
        """Store the packed prompts, `[prompt tokens, kv_heads, head_dim]` each, once for every row of a prompt."""
        keys, values = self._storages[layer]
        keys[cells.row, :, cells.column] = k[cells.token]
        values[cells.row, :, cells.column] = v[cells.token]

    def reserve(self) -> None:
        """Make room for the column of the next step; storage that is full grows by half, layer by layer."""
        if self.end < self._capacity:
            return
        self._capacity = self._wanted_capacity()
        assert self.end < self._capacity, (self.end, self._capacity)
        for layer, old in enumerate(self._storages):
            new = self._new_storage()
            new[:, :, :, : self.end] = old[:, : self.rows, :, : self.end]
            self._storages[layer] = new
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
        self._starts, self.sampled = self._starts[order], self.sampled[order]
        if self.rows:
            self._refresh_bias()
        return order

    def _wanted_capacity(self) -> int:
        """Half as many columns again as there are, but no more than can be filled: a last token is never fed back."""
        steps_left = self._max_new_tokens - max(1, int(self.sampled.min()))  # the prefill samples the first token
        return min(self.end + steps_left, self._capacity + max(LEAST_GROWTH, self._capacity // 2))

    def _new_storage(self) -> Tensor:
        shape = self._shape
        size = (2, self.rows, shape.kv_heads_per_rank, self._capacity, shape.head_dim)
        return torch.empty(size, dtype=shape.dtype, device=shape.device)

    def _refresh_bias(self) -> None:
        """The first column that anyone reads, and minus infinity before each row's start."""
        self._first = int(self._starts.min())
        self._bias = None
        if bool((self._starts != self._first).any()):
            before = torch.arange(self._capacity) < self._starts.unsqueeze(-1)
            bias = torch.zeros(before.shape, dtype=self._shape.dtype).masked_fill_(before, -torch.inf)
            self._bias = bias[:, None, None, :].to(self._shape.device)
