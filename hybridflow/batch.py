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
from hybridflow.parallel.world import World
from hybridflow.row_moves import Arrival, RowsOfRank, send_rows


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
        sampled_lengths: tokens of every response that the policy sampled, where tools said the others (these have
            loss_mask 0 from the start); None where no tools were there to be called.

    Example: two prompts with two samples each on four ranks: every rank is home to one row.
    """

    prompt_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    groups: tuple[int, ...]
    home: RowsOfRank
    samples: tuple[Sample, ...]
    columns: TokenColumns
    scores: Tensor | None = None
    sampled_lengths: tuple[int, ...] | None = None

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

    @property
    def policy_lengths(self) -> tuple[int, ...]:
        """Tokens of every response that the policy sampled."""
        return self.response_lengths if self.sampled_lengths is None else self.sampled_lengths

    @cached_property
    def is_trained(self) -> tuple[bool, ...]:
        """For each row whether it has a score (NaN: its reward failed), or none has been computed."""
        return (True,) * self.num_rows if self.scores is None else tuple((~self.scores.isnan()).tolist())

    def home_lengths(self, rank: int) -> tuple[int, ...]:
        """Response lengths of the rows at home on that rank."""
        return tuple(self.response_lengths[row] for row in self.home[rank])

    def with_columns(self, **columns: Tensor) -> Batch:
        return replace(self, columns=self.columns.with_columns(**columns))

    def send(self, world: World, rows_of: RowsOfRank, *, with_columns: bool = True) -> RowsOnTheWay:
        """Start to send each rank the rows that it asks for, with what has been computed for their tokens if wanted.
        Every rank calls it, and none waits here.
        """
        ids = torch.tensor([t for s in self.samples for t in (*s.prompt, *s.response)], dtype=torch.int64,
                           device=world.device).unsqueeze(1)
        present = self.columns.present() if with_columns else {}
        table = (send_rows(world, self.response_lengths, self.home, rows_of, torch.stack(list(present.values()), 1))
                 if present else None)
        cuts = [(self.prompt_lengths[row], self.response_lengths[row]) for row in rows_of[world.rank]]
        return RowsOnTheWay(cuts, send_rows(world, self.row_lengths, self.home, rows_of, ids), tuple(present), table)

    def fetch(self, world: World, rows_of: RowsOfRank, *, with_columns: bool = True) -> Rows:
        """As `send`, and wait for them."""
        return self.send(world, rows_of, with_columns=with_columns).wait()

    def deliver(self, world: World, holders: RowsOfRank, values: Tensor) -> Arrival:
        """Start to bring home what a role computed for each response token of the rows its `holders` have. Every rank
        calls it, and none waits here.

        Args:
            values: `[response tokens of my rows in holders]`.

        Returns:
            what will be `[response tokens of my home rows, 1]`.
        """
        return send_rows(world, self.response_lengths, holders, self.home, values.unsqueeze(1))

    def take(self, rank: int, rows: Sequence[int]) -> Batch:
        """The batch of these rows alone, ascending, kept where they are, with their groups numbered anew; `rank` is
        mine. Nothing moves.
        """
        place, mine = {row: new for new, row in enumerate(rows)}, self.home[rank]
        kept = [here for here, row in enumerate(mine) if row in place]
        starts = [0, *accumulate(self.response_lengths[row] for row in mine)]
        index = torch.tensor([token for here in kept for token in range(starts[here], starts[here + 1])],
                             dtype=torch.int64, device=self._device)
        groups = {group: new for new, group in enumerate(dict.fromkeys(self.groups[row] for row in rows))}
        return Batch(
            tuple(self.prompt_lengths[row] for row in rows), tuple(self.response_lengths[row] for row in rows),
            tuple(groups[self.groups[row]] for row in rows),
            tuple(tuple(place[row] for row in held if row in place) for held in self.home),
            tuple(self.samples[here] for here in kept), self.columns.select(index),
            None if self.scores is None else self.scores[list(rows)],
            None if self.sampled_lengths is None else tuple(self.sampled_lengths[row] for row in rows))

    @staticmethod
    def joined(batches: Sequence[Batch]) -> Batch:
        """One batch of all rows, those of the first batch first; columns are those that all have."""
        starts = [0, *accumulate(batch.num_rows for batch in batches)]
        firsts = [0, *accumulate(max(batch.groups, default=-1) + 1 for batch in batches)]
        names = set.intersection(*(set(batch.columns.present()) for batch in batches))
        scored = all(batch.scores is not None for batch in batches)
        observed = any(batch.sampled_lengths is not None for batch in batches)
        return Batch(
            tuple(length for batch in batches for length in batch.prompt_lengths),
            tuple(length for batch in batches for length in batch.response_lengths),
            tuple(first + group for first, batch in zip(firsts, batches) for group in batch.groups),
            tuple(tuple(start + row for start, batch in zip(starts, batches) for row in batch.home[rank])
                  for rank in range(len(batches[0].home))),
            tuple(sample for batch in batches for sample in batch.samples),
            TokenColumns(**{name: torch.cat([batch.columns.present()[name] for batch in batches]) for name in names}),
            torch.cat([batch.scores for batch in batches]) if scored else None,
            tuple(length for batch in batches for length in batch.policy_lengths) if observed else None)

    @property
    def _device(self) -> torch.device:
        columns = self.columns.present()
        return next(iter(columns.values())).device if columns else torch.device("cpu")

    def moved(self, world: World, home: RowsOfRank) -> Batch:
        """The same batch with its rows kept by other ranks. Collective."""
        rows = self.fetch(world, home)
        return replace(self, home=home, samples=rows.samples, columns=rows.columns)


@dataclass(frozen=True)
class RowsOnTheWay:
    """Rows that `Batch.send` sends to this rank.

    Attributes:
        cuts: prompt and response tokens of each row.
        ids: `[tokens, 1]` of prompts and responses.
        names, table: of the columns, and `[response tokens, columns]` of their values; None where there are none.
    """

    cuts: list[tuple[int, int]]
    ids: Arrival
    names: tuple[str, ...]
    table: Arrival | None

    def wait(self) -> Rows:
        """The rows, once they are here."""
        ids, samples, start = self.ids.wait().squeeze(1).tolist(), [], 0
        for prompt, response in self.cuts:
            middle, end = start + prompt, start + prompt + response
            samples.append(Sample(tuple(ids[start:middle]), tuple(ids[middle:end])))
            start = end
        columns = {} if self.table is None else dict(zip(self.names, self.table.wait().unbind(1), strict=True))
        return Rows(tuple(samples), TokenColumns(**columns))
