"""Roles: an engine on its mesh, fed with rows of a batch.

A role cuts rows over its replicas and micro-batches, runs them, and brings the answers home. It knows engines and
batches, and no algorithm: what to minimise is handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.reduction import GlobalCounts, LossReduction, loss_weights
from hybridflow.batch import Batch, Rows, RowsOfRank, split_rows
from hybridflow.engine.native import ForwardEngine, Loss, Output, TrainEngine, Update
from hybridflow.micro_batch import MicroBatch
from hybridflow.models.decoder import HeadOutput
from hybridflow.parallel.collectives import all_reduce
from hybridflow.parallel.mesh import everyone
from hybridflow.parallel.pipeline import Lane
from hybridflow.parallel.world import World


@dataclass(frozen=True)
class Reduction:
    """How an update's token losses become one number; `constant_length` is for that reduction alone."""

    kind: LossReduction
    constant_length: int | None = None

    def weights(self, mask: Tensor, lengths: tuple[int, ...], counts: GlobalCounts) -> Tensor:
        """`[targets]` of rows with these response lengths; `mask` `[targets]` says which tokens are trained."""
        return loss_weights(self.kind, mask, lengths, counts, constant_length=self.constant_length, dtype=mask.dtype)


class ScoringRole:
    """A role that answers: the base of all. `rows_at_once` is a replica's micro-batch when it only scores."""

    def __init__(self, engine: ForwardEngine, rows_at_once: int, lane: Lane | None = None) -> None:
        self.engine, self.rows_at_once, self.lane = engine, rows_at_once, lane

    @property
    def world(self) -> World:
        return self.engine.mesh.world

    def answer_tokens(self, batch: Batch) -> Tensor:
        """What the model says of each response token, brought home: `[response tokens of my home rows]`. Collective."""
        wanted = self.rows_of(range(batch.num_rows))
        rows = batch.fetch(self.world, wanted, with_columns=False)
        outputs = self.engine.forward(self._packed(rows, self.rows_at_once), self.lane)
        mine = [values(output) for output in outputs]
        answers = torch.cat(mine) if mine else self._nothing()
        return batch.deliver(self.world, self._answering(wanted), answers)

    def score_rows(self, batch: Batch) -> Tensor:
        """What a score head says at each row's last token: `[rows]` fp64, the same on every rank. Collective."""
        wanted = self.rows_of(range(batch.num_rows))
        rows = batch.fetch(self.world, wanted, with_columns=False)
        micro_batches = [MicroBatch.pack_last_tokens(chunk.samples, device=self.engine.mesh.device,
                                                     multiple_of=self.engine.token_multiple)
                         for chunk in rows.chunks(self.rows_at_once) or [rows]]
        outputs = self.engine.forward(micro_batches, self.lane)
        scores = torch.zeros(batch.num_rows, dtype=torch.float64, device=self.engine.mesh.device)
        if self.engine.answers:
            scores[list(wanted[self.world.rank])] = torch.cat([values(output) for output in outputs]).double()
        return sum_over_world(scores, self.world)

    def rows_of(self, rows: Sequence[int]) -> RowsOfRank:
        """The rows that each rank of the world runs: its replica's consecutive share."""
        grid = self.engine.mesh.grid
        shares = split_rows(rows, grid.layout.dp)
        return tuple(shares[grid.coord(rank).dp] for rank in range(self.world.size))

    def _answering(self, rows_of: RowsOfRank) -> RowsOfRank:
        """The same rows, on the last stage only: where answers are after a forward."""
        grid = self.engine.mesh.grid
        last = grid.layout.pp - 1
        return tuple(rows if grid.coord(rank).pp == last else () for rank, rows in enumerate(rows_of))

    def _packed(self, rows: Rows, at_once: int) -> list[MicroBatch]:
        """Micro-batches of `rows`; a replica without rows gets one without targets, to join every collective."""
        return [MicroBatch.pack(chunk.samples, chunk.columns, device=self.engine.mesh.device,
                                multiple_of=self.engine.token_multiple)
                for chunk in rows.chunks(at_once) or [rows]]

    def _nothing(self) -> Tensor:
        dtype = torch.promote_types(self.engine.options.dtype, torch.float32)
        return torch.zeros(0, dtype=dtype, device=self.engine.mesh.device)


class TrainedRole(ScoringRole):
    """A role that learns: actor, critic, or a model in supervised training."""

    def __init__(self, engine: TrainEngine, rows_at_once: int, micro_batch_size: int, reduction: Reduction,
                 lane: Lane | None = None) -> None:
        super().__init__(engine, rows_at_once, lane)
        self.trainer = engine
        self.micro_batch_size, self.reduction = micro_batch_size, reduction

    def update(self, batch: Batch, rows: Sequence[int], loss: Loss) -> Update:
        """One optimizer step on `rows` of the batch, which may be ragged over replicas. Collective."""
        share = self.rows_of(rows)
        lengths = [batch.response_lengths[row] for row in rows if batch.is_trained[row]]
        return self.learn(batch.fetch(self.world, share), response_counts(lengths), loss)

    def learn(self, mine: Rows, counts: GlobalCounts, loss: Loss) -> Update:
        """One optimizer step on this replica's rows; `counts` are those of all replicas. Collective.

        Tokens are trained where `loss_mask` says so, all where it is None. Where nothing is trained anywhere the step
        is skipped, and that is counted.
        """
        lengths = tuple(len(sample.response) for sample in mine.samples)
        mask = mine.columns.loss_mask
        mask = self._nothing().new_ones(sum(lengths)) if mask is None else mask
        weight = self.reduction.weights(mask, lengths, counts)
        weighted = Rows(mine.samples, mine.columns.with_columns(weight=weight))
        return self.trainer.train(self._packed(weighted, self.micro_batch_size), loss, skip=counts.tokens == 0,
                                  trace=self.lane)


def response_counts(response_lengths: Sequence[int]) -> GlobalCounts:
    """Counts of an optimizer batch in which every token of these responses is trained."""
    return GlobalCounts(tokens=sum(response_lengths), sequences=sum(length > 0 for length in response_lengths))


def values(output: Output) -> Tensor:
    """The one number for each target: log-probability, value or score `[targets]`."""
    return output.log_probs if isinstance(output, HeadOutput) else output


def sum_over_world(x: Tensor, world: World) -> Tensor:
    """Sum over all ranks, in place."""
    return all_reduce(x, everyone(world))

