"""What a part of a reward is asked, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridflow.batch import Batch
from hybridflow.crew import Crew
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.micro_batch import Sample
from hybridflow.parallel.world import World
from hybridflow.rewards.records import FaultKind, Outcome, RowFault, Score
from hybridflow.trainer.turns import Said


@dataclass(frozen=True)
class Asked:
    """The rows of a batch that a part scores.

    Attributes:
        key: stands for this scoring of a batch among others that may be under way.
        prompts: row i of the batch answers `prompts[batch.groups[i]]`.
        rows: all that are wanted, in order, the same on every rank.
        early: those that were handed in on this rank beforehand.
        elsewhere: those that were handed in on another rank.
    """

    key: int
    batch: Batch
    prompts: Sequence[TokenisedPrompt]
    rows: tuple[int, ...]
    early: frozenset[int] = frozenset()
    elsewhere: frozenset[int] = frozenset()

    def prompt(self, row: int) -> TokenisedPrompt:
        return self.prompts[self.batch.groups[row]]

    def at_home(self, world: World) -> Iterator[tuple[int, Sample]]:
        """The wanted rows that this rank keeps."""
        wanted = set(self.rows)
        for row, sample in zip(self.batch.home[world.rank], self.batch.samples, strict=True):
            if row in wanted:
                yield row, sample


@dataclass(frozen=True)
class Answer:
    """What a part says on this rank: no row is answered on two of them.

    Attributes:
        outcomes: by row of the batch.
        num_truncated: rows that were longer than the model can read.
    """

    outcomes: Mapping[int, Outcome]
    num_truncated: int = 0


class PartJudgement(Protocol):
    """Rows that a part has been asked about. `work` and `answer` follow in this order on every rank."""

    def work(self) -> None:
        """This rank's part of it, but for what goes on by itself."""
        ...

    def answer(self, crew: Crew) -> Answer:
        """What became of the rows, over all ranks of each. Collective over the crew, where all rows are at home."""
        ...


class RewardPart(Protocol):
    """A scorer of rows.

    Attributes:
        right_score: that of a right answer, None where no answer is simply right.
    """

    right_score: float | None

    def submit(self, key: int, row: int, prompt: TokenisedPrompt, response: Sequence[int],
               spoken: Said | None = None) -> None:
        """Take a row as soon as it has been generated, whatever its siblings do; not collective. `spoken` is what the
        model said in it, where tools may be called.
        """
        ...

    def ask(self, asked: Asked) -> PartJudgement:
        """Hand over what has not been handed in before. Every rank calls it, and none waits here."""
        ...

    def close(self) -> None:
        """End whatever processes it has."""
        ...


def model_outcome(score: float) -> Outcome:
    """What a reward model's number is: a score, or a fault."""
    return Score(score) if math.isfinite(score) else RowFault(FaultKind.NOT_FINITE, f"the score is {score}")
