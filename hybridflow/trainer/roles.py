"""Roles: an engine on its mesh, fed with rows of a batch.

A role cuts rows over its replicas and micro-batches, runs them, and brings the answers home. It knows engines and
batches, and no algorithm: what to minimise is handed in. Every rank makes the same calls; those that are not among the
role's only send and receive what is theirs of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.reduction import GlobalCounts, LossReduction, loss_weights
from hybridflow.batch import Batch, Rows, RowsOnTheWay
from hybridflow.context import ContextPart
from hybridflow.crew import Crew
from hybridflow.engine.blueprint import Elsewhere
from hybridflow.engine.native import ForwardEngine, Loss, Output, Resharder, TrainEngine, Update
from hybridflow.micro_batch import MicroBatch, reassemble
from hybridflow.models.decoder import HeadOutput
from hybridflow.packing import MicroBatching, SharedPrompt
from hybridflow.parallel.pipeline import Lane
from hybridflow.protocols import Protocol, answering, given
from hybridflow.row_moves import Arrival, RowsOfRank


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
    """A role that answers: the base of all. `at_once` is what a replica runs at once when it only scores.

    Attributes:
        engine: None on a rank that is not among the role's. There every call costs what its own rows' journey costs.
    """

    def __init__(self, engine: ForwardEngine | Elsewhere, at_once: MicroBatching, lane: Lane | None = None) -> None:
        self.blueprint, self.world = engine.blueprint, engine.world
        self.engine = None if isinstance(engine, Elsewhere) else engine
        self.scoring, self.lane = at_once, lane

    def ask_tokens(self, batch: Batch, *, keep_forward: bool = False) -> TokenAnswers:
        """Ask what the model says of each response token. Rows leave at once.

        Args:
            keep_forward: of a role that learns from the batch in one update next: that need not compute the forward of
                its first micro-batch again (`TrainEngine.forward`).
        """
        return TokenAnswers(self, batch, keep_forward)

    def ask_rows(self, batch: Batch) -> RowScores:
        """Ask what a score head says at each row's last token. Rows leave at once."""
        return RowScores(self, batch)

    def answer_tokens(self, batch: Batch) -> Tensor:
        """What the model says of each response token, brought home: `[response tokens of my home rows]`. Collective."""
        return self.ask_tokens(batch).answered()

    def score_rows(self, batch: Batch) -> Tensor:
        """What a score head says at each row's last token: `[rows]` fp64, the same on every rank. Collective."""
        asked = self.ask_rows(batch)
        asked.work()
        return asked.result(Crew.whole(self.world))

    def turn(self) -> AbstractContextManager[None]:
        """The engine's turn on the device, where there is one."""
        return nullcontext() if self.engine is None else self.engine.on_device()

    def share(self, rows: Sequence[int], lengths: Sequence[int], at_once: MicroBatching, together: int = 1,
              prompts: Sequence[SharedPrompt] | None = None) -> Share:
        """Cut `rows` of these lengths and prompts over replicas and micro-batches; every rank finds the same. Of units
        of `together` consecutive rows none is parted.

        Raises:
            ValueError: a row is longer than the budget of tokens.
        """
        grid, layout = self.blueprint.grid, self.blueprint.grid.layout
        cut = at_once.cut(lengths, layout.dp, self.blueprint.token_multiple * layout.cp, together,
                          prompts if self.blueprint.shares_prompts else None)
        of_replica = [tuple(rows[place] for micro_batch in replica for place in micro_batch) for replica in cut]
        mine = () if self.engine is None else cut[self.engine.mesh.coord.dp]
        return Share(given(Protocol.THREE_D, grid, of_replica, self.world.size),
                     tuple(len(micro_batch) for micro_batch in mine))

    def answering(self, rows_of: RowsOfRank) -> RowsOfRank:
        """The same rows, on the stage with the head only: where answers are after a forward."""
        return answering(Protocol.THREE_D, self.blueprint.grid, rows_of, self.blueprint.has_head)

    def answers(self, micro_batches: list[MicroBatch], keep_forward: bool = False) -> Tensor:
        """One number for each target of whole rows on the stage with the head, none on the others."""
        with self.turn():
            outputs = self.forward(micro_batches, keep_forward)
        assert self.engine is not None
        mine = [reassemble(values(output), micro_batch, self.engine.mesh.cp)
                for output, micro_batch in zip(outputs, micro_batches)]
        return torch.cat(mine) if mine else self.nothing()

    def forward(self, micro_batches: list[MicroBatch], keep_forward: bool) -> list[Output]:
        """What the engine gives for each."""
        assert self.engine is not None and not keep_forward, "a role that only answers"
        return self.engine.forward(micro_batches, self.lane)

    def pack(self, rows: Rows) -> MicroBatch:
        """My context rank's part of `rows`; without rows one without targets, to join every collective."""
        return MicroBatch.pack(rows.samples, rows.columns, device=self.world.device,
                               multiple_of=self.blueprint.token_multiple, cp=self.part,
                               share_prompts=self.blueprint.shares_prompts)

    def pack_last_tokens(self, rows: Rows) -> MicroBatch:
        """The same with a target a row, its last token; columns are `[rows]`."""
        return MicroBatch.pack_last_tokens(rows.samples, rows.columns, device=self.world.device,
                                           multiple_of=self.blueprint.token_multiple, cp=self.part,
                                           share_prompts=self.blueprint.shares_prompts)

    @property
    def part(self) -> ContextPart:
        """Of each row, what my context rank has."""
        assert self.engine is not None
        return ContextPart(self.engine.mesh.cp.size, self.engine.mesh.cp.index)

    def nothing(self) -> Tensor:
        """No answer, of the answers' dtype."""
        dtype = torch.promote_types(self.blueprint.options.dtype, torch.float32)
        return torch.zeros(0, dtype=dtype, device=self.world.device)


class TokenAnswers:
    """What a role has been asked of each response token. `work` and `result` follow in this order on every rank, and
    between them other roles may work.
    """

    def __init__(self, role: ScoringRole, batch: Batch, keep_forward: bool = False) -> None:
        self._role, self._batch, self._keep_forward = role, batch, keep_forward
        self._share = role.share(range(batch.num_rows), batch.row_lengths, role.scoring, prompts=batch.prompts)
        self._rows = batch.send(role.world, self._share.rows_of, with_columns=False)
        self._arrival: Arrival | None = None

    def work(self) -> None:
        """Let the role's ranks answer; answers leave for home."""
        role, answers = self._role, self._role.nothing()
        if role.engine is not None:
            packed = [role.pack(run) for run in self._rows.wait().runs(self._share.sizes)]
            answers = role.answers(packed, self._keep_forward)
        self._arrival = self._batch.deliver(role.world, role.answering(self._share.rows_of), answers)

    def result(self) -> Tensor:
        """`[response tokens of my home rows]`, once they are home."""
        assert self._arrival is not None, "work comes first"
        return self._arrival.wait().squeeze(1)

    def answered(self) -> Tensor:
        """Both at once."""
        self.work()
        return self.result()


class RowScores:
    """What a role has been asked of each row, as `TokenAnswers`."""

    def __init__(self, role: ScoringRole, batch: Batch) -> None:
        self._role = role
        self._share = role.share(range(batch.num_rows), batch.row_lengths, role.scoring, prompts=batch.prompts)
        self._rows = batch.send(role.world, self._share.rows_of, with_columns=False)
        self._scores = torch.zeros(batch.num_rows, dtype=torch.float64, device=role.world.device)

    def work(self) -> None:
        """Let the role's ranks score."""
        role = self._role
        if role.engine is None:
            return
        packed = [role.pack_last_tokens(run) for run in self._rows.wait().runs(self._share.sizes)]
        answers = role.answers(packed)
        if role.engine.answers:
            self._scores[list(self._share.rows_of[role.world.rank])] = answers.double()

    def result(self, crew: Crew) -> Tensor:
        """`[rows]` fp64, the same on every rank of the crew, which has the role's. Collective over it."""
        return crew.sum(self._scores)


@dataclass(frozen=True)
class Lesson:
    """The rows of one optimizer step, on their way to the role that learns from them. `counts` are those of all its
    replicas.
    """

    rows: RowsOnTheWay
    sizes: tuple[int, ...]
    counts: GlobalCounts


class TrainedRole(ScoringRole):
    """A role that learns: actor, critic, or a model in supervised training. `learned_at_once` is what a replica runs at
    once in an optimizer step: memory and speed, nothing else.
    """

    def __init__(self, engine: TrainEngine | Elsewhere, at_once: MicroBatching, learned_at_once: MicroBatching,
                 reduction: Reduction, lane: Lane | None = None) -> None:
        super().__init__(engine, at_once, lane)
        self.trainer = engine
        self.training, self.reduction = learned_at_once, reduction

    def forward(self, micro_batches: list[MicroBatch], keep_forward: bool) -> list[Output]:
        """What the engine gives for each. Nothing is kept where updates are cut otherwise."""
        assert isinstance(self.trainer, TrainEngine)
        return self.trainer.forward(micro_batches, self.lane,
                                    keep_first=keep_forward and self.scoring == self.training)

    def prepare(self, batch: Batch, rows: Sequence[int]) -> Lesson:
        """Send the role what it learns from in one optimizer step: `rows` of the batch, which may be ragged over
        replicas. Every rank calls it, and none waits here.
        """
        share = self.share(rows, [batch.row_lengths[row] for row in rows], self.training,
                           prompts=[batch.prompts[row] for row in rows])
        lengths = [batch.policy_lengths[row] for row in rows if batch.is_trained[row]]
        return Lesson(batch.send(self.world, share.rows_of), share.sizes, response_counts(lengths))

    def take(self, lesson: Lesson, loss: Loss, reshard: Resharder | None = None) -> Update | None:
        """One optimizer step; None on a rank that is not among the role's. Lessons are taken in the order in which they
        were prepared.
        """
        if self.engine is None:
            self.trainer.num_updates += 1
            return None
        return self.learn(lesson.rows.wait(), lesson.sizes, lesson.counts, loss, reshard)

    def update(self, batch: Batch, rows: Sequence[int], loss: Loss, reshard: Resharder | None = None) -> Update | None:
        """Both at once."""
        return self.take(self.prepare(batch, rows), loss, reshard)

    def learn(self, mine: Rows, sizes: Sequence[int], counts: GlobalCounts, loss: Loss,
              reshard: Resharder | None = None) -> Update:
        """One optimizer step on this replica's rows; `counts` are those of all replicas. Collective over the role.

        Tokens are trained where `loss_mask` says so, all where it is None. Where nothing is trained anywhere the step
        is skipped, and that is counted.

        Args:
            sizes: rows of each micro-batch, as in `Share`.
            reshard: takes the new weights; None if nobody wants them yet.
        """
        assert isinstance(self.trainer, TrainEngine)
        lengths = tuple(len(sample.response) for sample in mine.samples)
        mask = mine.columns.loss_mask
        mask = self.nothing().new_ones(sum(lengths)) if mask is None else mask
        weight = self.reduction.weights(mask, lengths, counts)
        weighted = Rows(mine.samples, mine.columns.with_columns(weight=weight))
        with self.turn():
            return self.trainer.train([self.pack(run) for run in weighted.runs(sizes)], loss, skip=counts.tokens == 0,
                                      trace=self.lane, reshard=reshard)


def response_counts(trained_lengths: Sequence[int]) -> GlobalCounts:
    """Counts of an optimizer batch whose responses have so many trained tokens each."""
    return GlobalCounts(tokens=sum(trained_lengths), sequences=sum(length > 0 for length in trained_lengths))


def values(output: Output) -> Tensor:
    """The one number for each target: log-probability, value or score `[targets]`."""
    return output.log_probs if isinstance(output, HeadOutput) else output
