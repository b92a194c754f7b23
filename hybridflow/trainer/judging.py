"""Who scores answers, as the dataflow sees them: rows are handed out, everyone does their part, scores come together.

Owns the protocol. Reward functions and models are `rewards`'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.crew import Crew
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.trainer.board import Metrics
from hybridflow.trainer.rewards.source import EarlyRows


class Judgement(Protocol):
    """Rows that have been handed to whoever scores them. `work` and `result` follow in this order on every rank."""

    def work(self) -> None:
        """This rank's part of it."""
        ...

    def result(self, crew: Crew) -> tuple[Tensor, Metrics]:
        """Scores `[rows]` fp64, equal on every rank of the crew, NaN where the reward failed; and metrics. Collective
        over the crew, where all rows are at home.
        """
        ...


class RewardSource(Protocol):
    """Where scores come from.

    Attributes:
        right_score: that of a right answer, None where no answer is simply right.
        last_fault: a sentence on the faults of the last call, None if there were none.
        last_extras: what was reported beside scores of the last call, by row, of rows that were scored on this rank.
    """

    right_score: float | None
    last_fault: str | None
    last_extras: Mapping[int, Mapping[str, Any]]

    def begin(self) -> EarlyRows:
        """A place for rows of a batch that is still being generated, to be given to `ask` with the whole of it."""
        ...

    def ask(self, batch: Batch, prompts: Sequence[TokenisedPrompt], early: EarlyRows | None = None,
            crew: Crew | None = None) -> Judgement:
        """Hand the rows out: row i answers `prompts[batch.groups[i]]`. Every rank calls it, and none waits here, but to
        learn which rows were handed in early on which ranks of `crew`; these two are given together, or neither.
        """
        ...

    def close(self) -> None:
        """End whatever processes it has."""
        ...


def judged(rewards: RewardSource, batch: Batch, prompts: Sequence[TokenisedPrompt], crew: Crew,
           early: EarlyRows | None = None) -> tuple[Tensor, Metrics]:
    """What `Judgement.result` gives, at once. Collective."""
    judgement = rewards.ask(batch, prompts, early, None if early is None else crew)
    judgement.work()
    return judgement.result(crew)


def score_moments(scores: Tensor) -> Metrics:
    """Mean, deviation and range of the scores that are numbers."""
    known = scores[~scores.isnan()]
    if not known.numel():
        return {}
    return {"reward/mean": known.mean().item(), "reward/std": known.std(correction=0).item(),
            "reward/min": known.min().item(), "reward/max": known.max().item()}
