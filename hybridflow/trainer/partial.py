"""Partial rollouts: answers that take long go on over several steps, under newer and newer weights, up to a bound.

Owns the prompts that are being answered and how far their answers are. A step waits for as many prompts as it learns
from, and for those whose time is up; the other answers are interrupted and go on where they are (AReaL,
arXiv 2505.24298, section 4.1, with the interruption at the hand-over of weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hybridflow.batch import Batch
from hybridflow.crew import Crew
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.generation.records import Begun, Completion, FinishReason, Prompt, SamplingParams
from hybridflow.generation.work_source import PinnedShare
from hybridflow.observe.phases import Phase
from hybridflow.parallel.mesh import Mesh
from hybridflow.parallel.shared_count import SharedCount
from hybridflow.protocols import TRANSFERS, Protocol
from hybridflow.trainer.board import Board
from hybridflow.trainer.rollout import Answered, Rollout, Sampler, batch_of
from hybridflow.trainer.rollout_source import Experience, More, handed_over

ASK_EVERY = 8  # steps of generation between two looks at how far the others are


@dataclass(frozen=True)
class Row:
    """How far one answer is, as every rank knows it.

    Attributes:
        replica: that has begun it; None where none has.
        length: tokens of its response.
        ended, stopped: whether it has ended, and at a stop.
    """

    replica: int | None = None
    length: int = 0
    ended: bool = False
    stopped: bool = False


@dataclass(frozen=True)
class Group:
    """The answers to one prompt. `came_in` is the step that brought it."""

    prompt: TokenisedPrompt
    came_in: int
    rows: tuple[Row, ...]

    @property
    def is_complete(self) -> bool:
        return all(row.ended for row in self.rows)


class PartialRollouts:
    """Batches of the prompts that are answered first, and of those that are due. With `max_staleness` 1 that is
    one-step-off-policy.

    Attributes:
        pool: prompts that nobody has learned from, in the order in which they came; the same on every rank.
        made: what this rank's replica has of their answers, by prompt and sample.
    """

    def __init__(self, sampler: Sampler, sampling: SamplingParams, samples_per_prompt: int, prompts_per_step: int,
                 max_staleness: int) -> None:
        """`max_staleness`: steps, at most, from that in which answers to a prompt begin to that which learns from it.
        """
        self.steps_ahead = max_staleness
        self._sampler, self._sampling, self._samples = sampler, sampling, samples_per_prompt
        self._wanted, self._num_started, self._num_learned = prompts_per_step, 0, 0
        self.pool: list[Group] = []
        self.made: dict[tuple[int, int], Completion] = {}
        self._ready: SharedCount | None = None

    def start(self, prompts: Sequence[TokenisedPrompt]) -> None:
        """Take prompts in, and once there are enough go on with the answers, under the actor's newest weights."""
        self.pool += [Group(prompt, self._num_started, (Row(),) * self._samples) for prompt in prompts]
        self._num_started += 1
        if self._num_started >= self.steps_ahead:
            self._sampler.renew()
            with self._sampler.timer.phase(Phase.GENERATE):
                self._go_on()

    def next(self, prompts: Sequence[TokenisedPrompt], board: Board, more: More | None = None) -> Experience:
        """As `RolloutSource.next`."""
        self.rest()  # nobody has been through a step before the first one
        self._hear()
        chosen = self.chosen()
        rollout = self._rollout(chosen)
        batch = handed_over(rollout.batch, self._sampler)
        self.pool = [group for group in self.pool if group not in chosen]
        board.said |= rollout.metrics() | {"rollout/carried": float(self._num_begun())}
        self._num_learned += 1
        self.start(prompts)
        self._sampler.tell_reshard(board)
        return Experience([group.prompt for group in chosen], batch)

    def rest(self) -> None:
        """Those who generate may stop: this rank waits for them."""
        if self._ready is not None and not isinstance(self._sampler.hybrid.mesh, Mesh):
            self._ready.fetch_add(1)

    def is_due(self, group: Group) -> bool:
        """Whether the next batch must have it: the one after would come too late."""
        return group.came_in <= self._num_learned

    def chosen(self) -> list[Group]:
        """Of the next batch: those that are due, then the oldest of what is complete."""
        ready = [group for group in self.pool if group.is_complete]
        assert all(group.is_complete for group in self.pool if self.is_due(group)), "generation ended too early"
        return sorted(ready, key=lambda group: (not self.is_due(group), group.came_in))[:self._wanted]

    def _go_on(self) -> None:
        """Generate until enough prompts are complete and somebody waits for them. Ranks that do not generate go on."""
        mesh = self._sampler.hybrid.mesh
        finished, self._ready = mesh.world.count(), mesh.world.count()
        if not isinstance(mesh, Mesh):
            return
        places = [(group, sample) for group in self.pool for sample, row in enumerate(group.rows) if not row.ended]
        requests = [self._request(group.prompt, sample) for group, sample in places]
        pins = [group.rows[sample].replica for group, sample in places]
        pins = [next((row.replica for row in group.rows if row.replica is not None), pin)
                for (group, _), pin in zip(places, pins, strict=True)]
        source = PinnedShare(requests, self._sampling, pins, mesh.layout.dp, mesh.coord.dp)
        mine = [places[index] for portion in source.portions[mesh.coord.dp] for index in portion.indices]
        progress = Progress(self._wanted - sum(group.is_complete for group in self.pool), finished, self._ready,
                             _left(mine), {group.prompt.id for group, _ in mine if self.is_due(group)})
        leads = mesh.tp.index == 0 and mesh.is_last_stage  # of the replica, which stops where this rank says so
        completions = self._sampler.hybrid.generator.generate(
            requests, self._sampling, self._sampler.seed, expected_version=self._sampler.hybrid.version, source=source,
            interrupt=progress.is_enough if leads else None,
            ended=(lambda index, ids: progress.end(requests[index].id)) if leads else None)
        for place, completion in zip(sorted(source.taken), completions, strict=True):
            if completion.response_ids:
                self.made[requests[place].id, requests[place].sample] = completion

    def _request(self, prompt: TokenisedPrompt, sample: int) -> Prompt:
        """An answer to begin, or where this replica has begun it, to go on with."""
        old = self.made.get((prompt.id, sample))
        begun = None if old is None else Begun(old.response_ids, old.log_probs, old.processed_log_probs, old.versions)
        return Prompt(prompt.id, sample, prompt.ids, begun)

    def _hear(self) -> None:
        """How far every answer is, on every rank. Collective over the world."""
        mesh = self._sampler.hybrid.mesh
        places = {(group.prompt.id, sample): place for place, (group, sample) in enumerate(
            (group, sample) for group in self.pool for sample in range(self._samples))}
        table = torch.zeros(4, len(places), dtype=torch.int64)
        if isinstance(mesh, Mesh) and TRANSFERS[Protocol.THREE_D_ALL_MICRO_DP].answers(mesh.coord, mesh.layout):
            for key, one in self.made.items():
                reason = one.finish_reason
                table[:, places[key]] = torch.tensor([mesh.coord.dp + 1, len(one.response_ids),
                                                      reason is not FinishReason.INTERRUPTED,
                                                      reason is FinishReason.STOP])
        heard = Crew.whole(mesh.world).sum(table.to(mesh.device)).T.tolist()
        rows = [Row(replica - 1 if replica else None, length, bool(ended), bool(stopped))
                for replica, length, ended, stopped in heard]
        self.pool = [replace(group, rows=tuple(rows[place * self._samples:(place + 1) * self._samples]))
                     for place, group in enumerate(self.pool)]

    def _rollout(self, chosen: Sequence[Group]) -> Rollout:
        """The answers of these groups, which are then no longer this source's."""
        mesh, rows = self._sampler.hybrid.mesh, [row for group in chosen for row in group.rows]
        answered = Answered(tuple(row.replica for row in rows), tuple(row.length for row in rows),
                            sum(row.stopped for row in rows))
        requests = [Prompt(group.prompt.id, sample, group.prompt.ids)
                    for group in chosen for sample in range(self._samples)]
        by_row = {place: self.made.pop((one.id, one.sample)) for place, one in enumerate(requests)
                  if (one.id, one.sample) in self.made}
        groups = tuple(place for place in range(len(chosen)) for _ in range(self._samples))
        dtype = torch.promote_types(self._sampler.actor.blueprint.options.dtype, torch.float32)
        batch: Batch = batch_of(mesh, requests, groups, by_row, answered, dtype, tells_versions=True)
        return Rollout(batch, answered.finished, answered.replica)

    def _num_begun(self) -> int:
        return sum(row.length > 0 for group in self.pool for row in group.rows)


class Progress:
    """When a replica may stop: enough prompts are complete over all replicas, none of its own is due, and those who
    learn are waiting. As long as they are not, its ranks have nothing better to do than to go on.
    """

    def __init__(self, wanted: int, finished: SharedCount, ready: SharedCount, left: dict[int, int],
                 due: set[int]) -> None:
        """
        Args:
            wanted: prompts that have to become complete, over all replicas.
            finished: how many have, on all replicas.
            ready: ranks that wait for the batch.
            left: by prompt of this replica the answers that have not ended.
            due: prompts of this replica that must become complete.
        """
        self.wanted, self.finished, self.ready, self._left, self.due = wanted, finished, ready, left, due
        self._asked = 0

    def end(self, prompt: int) -> None:
        """An answer to this prompt has ended."""
        self._left[prompt] -= 1
        if self._left[prompt] == 0:
            self.due.discard(prompt)
            self.finished.fetch_add(1)

    def is_enough(self) -> bool:
        """Asked in every step; how far the others are is looked up now and then."""
        self._asked += 1
        if self.due or self._asked % ASK_EVERY:
            return False
        return self.finished.fetch_add(0) >= self.wanted and self.ready.fetch_add(0) > 0


def _left(places: Sequence[tuple[Group, int]]) -> dict[int, int]:
    left: dict[int, int] = {}
    for group, _ in places:
        left[group.prompt.id] = left.get(group.prompt.id, 0) + 1
    return left
