"""Batch: the rollouts of one step, and which rank holds which rows of them.

Lengths, ids of prompts and one number a row are small and known to every rank. Token data is held by each row's home
rank alone, and goes point-to-point, by the same planner as weights, to the ranks whose role needs it and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.packing import SharedPrompt
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.plan import TransferPlan
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.transfer import execute
from hybridflow.parallel.world import World

# For each rank of the world the rows it holds, in the order it keeps them.
RowsOfRank = tuple[tuple[int, ...], ...]


def row_map(lengths: Sequence[int], rows_of: RowsOfRank, width: int) -> ShardMap:
    """A shard map of the canonical `[sum(lengths), width]` table whose rows lie one after another.

    Neighbouring rows that a rank keeps in order are one box.
    """
    starts = [0, *accumulate(lengths)]

    def shards_of(rank: int) -> list[Shard]:
        shards, place = [], 0
        for first, last in _runs(rows_of[rank]):
            box = Box("rows", (starts[first], 0), (starts[last + 1], width))
            if box.numel:
                shards.append(Shard(box, "rows", place * width, (width, 1)))
            place += starts[last + 1] - starts[first]
        return shards
    return ShardMap({"rows": (starts[-1], width)}, tuple(range(len(rows_of))), shards_of)


def move_rows(world: World, lengths: Sequence[int], src: RowsOfRank, dst: RowsOfRank, values: Tensor) -> Tensor:
    """Move ragged rows from the ranks `src` to the ranks `dst`. Collective.

    Args:
        lengths: entries of every row of the batch.
        values: `[entries of my src rows, width]`; ranks without rows give `[0, width]`.

    Returns:
        `[entries of my dst rows, width]`.
    """
    width = values.shape[1]
    plan = TransferPlan(row_map(lengths, src, width), row_map(lengths, dst, width))
    wanted = sum(lengths[row] for row in dst[world.rank])
    out = values.new_empty(wanted, width)
    execute(plan, world, {"rows": values.contiguous()}, {"rows": out}, wire_dtype=values.dtype)
    return out


@dataclass(frozen=True)
class Rows:
    """Rows as one rank holds them: their samples and columns (`[targets]` each), row after row."""

    samples: tuple[Sample, ...]
    columns: TokenColumns

    def runs(self, sizes: Sequence[int]) -> list[Rows]:
        """Consecutive runs of these numbers of rows, which add up to all of them."""
        ends = [0, *accumulate(len(sample.response) for sample in self.samples)]
        runs, start = [], 0
        for stop in accumulate(sizes):
            columns = {name: c[ends[start]:ends[stop]] for name, c in self.columns.present().items()}
            runs.append(Rows(self.samples[start:stop], TokenColumns(**columns)))
            start = stop
        assert start == len(self.samples), (sizes, len(self.samples))
        return runs


@dataclass(frozen=True)
class Batch:
    """Rollouts: row `prompt * samples_per_prompt + sample` answers that prompt.

    Attributes:
        prompt_lengths, response_lengths: tokens of every row.
        groups: the prompt's place in the step of every row.
        home: the rows that each rank keeps; `samples` and `columns` are mine.
        scores: `[rows]` fp64 on every rank, NaN where the reward failed; None before rewards were computed.

    Example: two prompts with two samples each on four ranks: every rank is home to one row.
    """

    prompt_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    groups: tuple[int, ...]
    home: RowsOfRank
    samples: tuple[Sample, ...]
    columns: TokenColumns
    scores: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.response_lengths)

    @cached_property
    def row_lengths(self) -> tuple[int, ...]:
        """Prompt and response tokens of every row."""
        return tuple(p + r for p, r in zip(self.prompt_lengths, self.response_lengths, strict=True))

    @cached_property
    def prompts(self) -> tuple[SharedPrompt, ...]:
        """Of every row, which others have the same."""
        return tuple(map(SharedPrompt, self.groups, self.prompt_lengths))

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens of all rows."""
        return sum(self.row_lengths)

    @cached_property
    def is_trained(self) -> tuple[bool, ...]:
        """For each row whether it has a score (NaN: its reward failed), or none has been computed."""
        return (True,) * self.num_rows if self.scores is None else tuple((~self.scores.isnan()).tolist())

    def home_lengths(self, world: World) -> tuple[int, ...]:
        """Response lengths of the rows at home on this rank."""
        return tuple(self.response_lengths[row] for row in self.home[world.rank])

    def with_columns(self, **columns: Tensor) -> Batch:
        return replace(self, columns=self.columns.with_columns(**columns))

    def fetch(self, world: World, rows_of: RowsOfRank, *, with_columns: bool = True) -> Rows:
        """The rows that each rank asks for, with what has been computed for their tokens if wanted. Collective."""
        ids = torch.tensor([t for s in self.samples for t in (*s.prompt, *s.response)], dtype=torch.int64,
                           device=world.device).unsqueeze(1)
        ids = move_rows(world, self.row_lengths, self.home, rows_of, ids).squeeze(1).tolist()
        samples, start = [], 0
        for row in rows_of[world.rank]:
            middle, end = start + self.prompt_lengths[row], start + self.row_lengths[row]
            samples.append(Sample(tuple(ids[start:middle]), tuple(ids[middle:end])))
            start = end
        return Rows(tuple(samples), self._fetch_columns(world, rows_of) if with_columns else TokenColumns())

    def _fetch_columns(self, world: World, rows_of: RowsOfRank) -> TokenColumns:
        present = self.columns.present()
        if not present:
            return TokenColumns()
        table = move_rows(world, self.response_lengths, self.home, rows_of, torch.stack(list(present.values()), 1))
        return TokenColumns(**dict(zip(present, table.unbind(1))))

    def deliver(self, world: World, holders: RowsOfRank, values: Tensor) -> Tensor:
        """Bring home what a role computed for each response token of the rows its `holders` have. Collective.

        Args:
            values: `[response tokens of my rows in holders]`.
        """
        return move_rows(world, self.response_lengths, holders, self.home, values.unsqueeze(1)).squeeze(1)


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal runs of consecutive row numbers as (first, last)."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] + 1 == row:
            runs[-1] = (runs[-1][0], row)
        else:
            runs.append((row, row))
    return runs
