"""Where the next batch to learn from comes from: generated now, or while the one before was learned from.

Owns the order of generating, resharding and handing over. It never judges and never trains. Every rank makes the same
calls; who waits for whom follows from what each has to receive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hybridflow.batch import Batch
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.generation.records import SamplingParams, greedily
from hybridflow.observe.phases import Phase
from hybridflow.packing import split_rows
from hybridflow.protocols import Protocol as Transfers
from hybridflow.protocols import given
from hybridflow.trainer.board import Board
from hybridflow.trainer.judging import RewardSource
from hybridflow.trainer.rewards.source import EarlyRows
from hybridflow.trainer.roles import ScoringRole
from hybridflow.trainer.rollout import Rollout, RolloutUnderWay, Sampler
from hybridflow.trainer.row_stream import NUM_CHUNKS, StreamedAnswers, listens

More = Callable[[], Sequence[TokenisedPrompt]]


@dataclass(frozen=True)
class Experience:
    """Answers and what was asked: row i of `batch` answers `prompts[batch.groups[i]]`.

    Attributes:
        streamed: by column what a role has said of the batch while it was generated.
        greedy: the greedy answer to each prompt, in their order; None where nobody needs it.
        early: the rows whose rewards have been asked for already; None where none can have been.
    """

    prompts: Sequence[TokenisedPrompt]
    batch: Batch
    streamed: Mapping[str, StreamedAnswers] = field(default_factory=dict)
    greedy: Batch | None = None
    early: EarlyRows | None = None


class RolloutSource(Protocol):
    """Hands out batches. `start` comes before the first `next` where the source wants to be a step ahead.

    Attributes:
        steps_ahead: how many `start` calls it wants.
    """

    steps_ahead: int

    def start(self, prompts: Sequence[TokenisedPrompt]) -> None:
        """Begin to answer the first prompts."""
        ...

    def next(self, prompts: Sequence[TokenisedPrompt], board: Board, more: More | None = None) -> Experience:
        """What to learn from in this step. Collective over the world.

        Args:
            prompts: the new ones of this step.
            more: gives further prompts; None where there are none.
        """
        ...

    def rest(self) -> None:
        """This rank is through with its part of the step, and has nothing to do until the others are. Nobody waits."""
        ...


class OnPolicy:
    """Every batch is answered under the weights that learn from it first. Rewards are asked for as answers end, and
    roles whose ranks would wait meanwhile work on these.

    Attributes:
        listening: those roles, by the column that they fill.
    """

    steps_ahead = 0

    def __init__(self, sampler: Sampler, rewards: RewardSource, sampling: SamplingParams, samples_per_prompt: int,
                 scoring: Mapping[str, tuple[Phase, ScoringRole]], *, with_greedy: bool = False) -> None:
        """
        Args:
            scoring: by column who fills it from the tokens of answers alone.
            with_greedy: answer every prompt once more, greedily.
        """
        self._with_greedy, self._rewards = with_greedy, rewards
        self._sampler, self._sampling, self._samples = sampler, sampling, samples_per_prompt
        grid = sampler.hybrid.mesh.grid
        self.listening = {column: (phase, role) for column, (phase, role) in scoring.items()
                           if listens(role.blueprint.grid, grid)}

    def start(self, prompts: Sequence[TokenisedPrompt]) -> None:
        raise AssertionError("nothing is begun ahead")

    def rest(self) -> None:
        """Nobody goes on for want of something to do."""

    def next(self, prompts: Sequence[TokenisedPrompt], board: Board, more: More | None = None) -> Experience:
        sampler, grid = self._sampler, self._sampler.hybrid.mesh.grid
        sampler.renew()
        greedy = None
        if self._with_greedy:
            greedy = sampler.start(prompts, greedily(self._sampling), 1, more_follows=True).finish().batch
        streams = {column: StreamedAnswers(role, grid) for column, (_, role) in self.listening.items()}
        early = self._rewards.begin()
        under_way = sampler.start(prompts, self._sampling, self._samples,
                                  [role.blueprint.grid for _, role in self.listening.values()],
                                  ended=lambda row, ids, spoken: early.submit(
                                      row, prompts[row // self._samples], ids, spoken))
        for chunk in range(NUM_CHUNKS):
            for column, (phase, _) in self.listening.items():
                with sampler.timer.phase(phase):
                    streams[column].listen(chunk)
        rollout = under_way.finish()
        _tell(board, rollout, sampler)
        return Experience(prompts, rollout.batch, {column: stream.bind(rollout.batch, rollout.replicas)
                                                   for column, stream in streams.items()}, greedy, early)


class OneStepOff:
    """While a batch is learned from, ranks that do nothing else answer the next one under the weights from before.

    At the start of a step every rank hears of the batch that is ready; its rows go to the actor's training ranks, its
    weights to the generating ones. Then these begin the next batch, and the others learn.
    """

    steps_ahead = 1

    def __init__(self, sampler: Sampler, sampling: SamplingParams, samples_per_prompt: int) -> None:
        self._sampler, self._sampling, self._samples = sampler, sampling, samples_per_prompt
        self._waiting: tuple[Sequence[TokenisedPrompt], RolloutUnderWay] | None = None

    def start(self, prompts: Sequence[TokenisedPrompt]) -> None:
        assert self._waiting is None, "one batch is ahead already"
        self._sampler.renew()
        self._waiting = prompts, self._sampler.start(prompts, self._sampling, self._samples)

    def next(self, prompts: Sequence[TokenisedPrompt], board: Board, more: More | None = None) -> Experience:
        assert self._waiting is not None, "start comes first"
        (asked, under_way), self._waiting = self._waiting, None
        rollout = under_way.finish()
        batch = handed_over(rollout.batch, self._sampler)
        self.start(prompts)
        _tell(board, rollout, self._sampler)
        return Experience(asked, batch)

    def rest(self) -> None:
        """A batch is generated whole, whoever waits."""


def handed_over(batch: Batch, sampler: Sampler) -> Batch:
    """The batch with its rows spread over the ranks on which the actor trains. Collective over the world."""
    world, grid = sampler.world, sampler.actor.blueprint.grid
    parts = split_rows(range(batch.num_rows), grid.layout.size)
    return batch.moved(world, given(Transfers.DP, grid, parts, world.size))


def _tell(board: Board, rollout: Rollout, sampler: Sampler) -> None:
    board.said |= rollout.metrics()
    sampler.tell_reshard(board)
