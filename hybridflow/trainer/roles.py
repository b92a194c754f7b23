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
from hybridflow.batch import Batch, Rows, RowsOfRank
from hybridflow.context import ContextPart
from hybridflow.engine.native import ForwardEngine, Loss, Output, Resharder, TrainEngine, Update
from hybridflow.micro_batch import MicroBatch, reassemble
from hybridflow.models.decoder import HeadOutput
from hybridflow.packing import MicroBatching, SharedPrompt
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


@dataclass(frozen=True)
class Share:
    """Who runs which rows of a batch, and how many of them this rank runs at once.

    `sizes` are the rows of each of this rank's micro-batches, in order, 0 where it only joins the others. Example: rank
    0 of two replicas with `rows_of` ((4, 0, 2), (1, 3)) and `sizes` (2, 1) runs rows 4 and 0, then row 2.
    """

    rows_of: RowsOfRank
    sizes: tuple[int, ...]


class ScoringRole:
    """A role that answers: the base of all. `at_once` is what a replica runs at once when it only scores."""

    def __init__(self, engine: ForwardEngine, at_once: MicroBatching, lane: Lane | None = None) -> None:
        self.engine, self.scoring, self.lane = engine, at_once, lane

    @property
    def world(self) -> World:
        return self.engine.mesh.world

    def answer_tokens(self, batch: Batch) -> Tensor:
        """What the model says of each response token, brought home: `[response tokens of my home rows]`. Collective."""
        share = self.share(range(batch.num_rows), batch.row_lengths, self.scoring, batch.prompts)
        rows = batch.fetch(self.world, share.rows_of, with_columns=False)
        answers = self._answers([self._pack(run) for run in rows.runs(share.sizes)])
        return batch.deliver(self.world, self._answering(share.rows_of), answers)

    def score_rows(self, batch: Batch) -> Tensor:
        """What a score head says at each row's last token: `[rows]` fp64, the same on every rank. Collective."""
        share = self.share(range(batch.num_rows), batch.row_lengths, self.scoring, batch.prompts)
        rows = batch.fetch(self.world, share.rows_of, with_columns=False)
        answers = self._answers([
            MicroBatch.pack_last_tokens(run.samples, device=self.engine.mesh.device,
                                        multiple_of=self.engine.token_multiple, cp=self._part,
                                        share_prompts=self.engine.shares_prompts)
            for run in rows.runs(share.sizes)])
        scores = torch.zeros(batch.num_rows, dtype=torch.float64, device=self.engine.mesh.device)
        if self.engine.answers:
            scores[list(share.rows_of[self.world.rank])] = answers.double()
        return sum_over_world(scores, self.world)

    def share(self, rows: Sequence[int], lengths: Sequence[int], at_once: MicroBatching,
              prompts: Sequence[SharedPrompt] | None = None) -> Share:
        """Cut `rows` of these lengths and prompts over replicas and micro-batches; every rank finds the same.

        Raises:
            ValueError: a row is longer than the budget of tokens.
        """
        grid, layout = self.engine.mesh.grid, self.engine.mesh.layout
        cut = at_once.cut(lengths, layout.dp, self.engine.token_multiple * layout.cp,
                          prompts if self.engine.shares_prompts else None)
        of_replica = [tuple(rows[place] for micro_batch in replica for place in micro_batch) for replica in cut]
        return Share(tuple(of_replica[grid.coord(rank).dp] for rank in range(self.world.size)),
                     tuple(len(micro_batch) for micro_batch in cut[self.engine.mesh.coord.dp]))

    def _answering(self, rows_of: RowsOfRank) -> RowsOfRank:
        """The same rows, on the stage with the head only: where answers are after a forward."""
        grid = self.engine.mesh.grid
        head_stage = self.engine.chunks.head_stage
        return tuple(rows if grid.coord(rank).pp == head_stage else () for rank, rows in enumerate(rows_of))

    def _answers(self, micro_batches: list[MicroBatch]) -> Tensor:
        """One number for each target of whole rows on the stage with the head, none on the others."""
        with self.engine.on_device():
            outputs = self.engine.forward(micro_batches, self.lane)
        mine = [reassemble(values(output), micro_batch, self.engine.mesh.cp)
                for output, micro_batch in zip(outputs, micro_batches)]
        return torch.cat(mine) if mine else self._nothing()

    def _pack(self, rows: Rows) -> MicroBatch:
        """My context rank's part of `rows`; without rows one without targets, to join every collective."""
        return MicroBatch.pack(rows.samples, rows.columns, device=self.engine.mesh.device,
                               multiple_of=self.engine.token_multiple, cp=self._part,
                               share_prompts=self.engine.shares_prompts)

    @property
    def _part(self) -> ContextPart:
        return ContextPart(self.engine.mesh.cp.size, self.engine.mesh.cp.index)

    def _nothing(self) -> Tensor:
        dtype = torch.promote_types(self.engine.options.dtype, torch.float32)
        return torch.zeros(0, dtype=dtype, device=self.engine.mesh.device)


class TrainedRole(ScoringRole):
    """A role that learns: actor, critic, or a model in supervised training. `learned_at_once` is what a replica runs at
    once in an optimizer step: memory and speed, nothing else.
    """

    def __init__(self, engine: TrainEngine, at_once: MicroBatching, learned_at_once: MicroBatching,
                 reduction: Reduction, lane: Lane | None = None) -> None:
        super().__init__(engine, at_once, lane)
        self.trainer = engine
        self.training, self.reduction = learned_at_once, reduction

    def update(self, batch: Batch, rows: Sequence[int], loss: Loss, reshard: Resharder | None = None) -> Update:
        """One optimizer step on `rows` of the batch, which may be ragged over replicas. Collective."""
        share = self.share(rows, [batch.row_lengths[row] for row in rows], self.training,
                           [batch.prompts[row] for row in rows])
        lengths = [batch.response_lengths[row] for row in rows if batch.is_trained[row]]
        return self.learn(batch.fetch(self.world, share.rows_of), share.sizes, response_counts(lengths), loss,
                          reshard)

    def learn(self, mine: Rows, sizes: Sequence[int], counts: GlobalCounts, loss: Loss,
              reshard: Resharder | None = None) -> Update:
        """One optimizer step on this replica's rows; `counts` are those of all replicas. Collective.

        Tokens are trained where `loss_mask` says so, all where it is None. Where nothing is trained anywhere the step
        is skipped, and that is counted.

        Args:
            sizes: rows of each micro-batch, as in `Share`.
            reshard: takes the new weights; None if nobody wants them yet.
        """
        lengths = tuple(len(sample.response) for sample in mine.samples)
        mask = mine.columns.loss_mask
        mask = self._nothing().new_ones(sum(lengths)) if mask is None else mask
        weight = self.reduction.weights(mask, lengths, counts)
        weighted = Rows(mine.samples, mine.columns.with_columns(weight=weight))
        with self.engine.on_device():
            return self.trainer.train([self._pack(run) for run in weighted.runs(sizes)], loss, skip=counts.tokens == 0,
                                      trace=self.lane, reshard=reshard)


def response_counts(response_lengths: Sequence[int]) -> GlobalCounts:
    """Counts of an optimizer batch in which every token of these responses is trained."""
    return GlobalCounts(tokens=sum(response_lengths), sequences=sum(length > 0 for length in response_lengths))


def values(output: Output) -> Tensor:
    """The one number for each target: log-probability, value or score `[targets]`."""
    return output.log_probs if isinstance(output, HeadOutput) else output


def sum_over_world(x: Tensor, world: World) -> Tensor:
    """Sum over all ranks, in place."""
    return all_reduce(x, everyone(world))

