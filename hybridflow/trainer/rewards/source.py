"""The rewards of a run: each part asked for its rows, the weighted sum over parts, one table on every rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.crew import Crew
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.rewards.policy import FaultPolicy
from hybridflow.rewards.records import FaultKind, Score
from hybridflow.trainer.rewards.part import Answer, Asked, PartJudgement, RewardPart
from hybridflow.trainer.rewards.report import Told, require_going_on, sentence, tell
from hybridflow.trainer.turns import Said


@dataclass(frozen=True)
class WeightedPart:
    """A part and its place in the sum.

    Attributes:
        name: of its metrics; "" where it is the only part.
        data_sources: whose rows it scores; empty for all.
    """

    scorer: RewardPart
    policy: FaultPolicy
    name: str = ""
    weight: float = 1.0
    data_sources: frozenset[str] = frozenset()

    def scores(self, data_source: str) -> bool:
        """Whether rows of this data source are its."""
        return not self.data_sources or data_source in self.data_sources


@dataclass(frozen=True)
class EarlyRows:
    """Rows of a batch that is still being generated. Example: `early = rewards.begin(); early.submit(7, prompt, ids)`.

    Each row is handed in on one rank, or on none.
    """

    key: int
    parts: Sequence[WeightedPart]
    rows: set[int] = field(default_factory=set)

    def submit(self, row: int, prompt: TokenisedPrompt, response: Sequence[int], spoken: Said | None = None) -> None:
        """Let functions begin with `row`, as the batch will number it. Returns at once; not collective."""
        for part in self.parts:
            if part.scores(prompt.record.data_source):
                part.scorer.submit(self.key, row, prompt, response, spoken)
        self.rows.add(row)


class Rewards:
    """Where scores come from.

    Attributes:
        right_score: that of a right answer; None where no answer is simply right, as in a sum.
        last_fault: what went wrong in the last batch, the same sentence on every rank; None if nothing did.
        last_extras: what functions returned beside scores for the last batch, by row, of rows that this rank scored.
            Where parts name a thing alike, it is the first part's.
    """

    def __init__(self, parts: Sequence[WeightedPart], judged: str = "reward") -> None:
        """`judged`: what a row is given, in messages."""
        self.parts, self.judged = tuple(parts), judged
        self.right_score = parts[0].scorer.right_score if len(parts) == 1 else None
        self.last_fault: str | None = None
        self.last_extras: Mapping[int, Mapping[str, Any]] = {}
        self._keys = count()

    def begin(self) -> EarlyRows:
        """A place for rows as they are generated, to be given to `ask` with the whole batch."""
        return EarlyRows(next(self._keys), self.parts)

    def ask(self, batch: Batch, prompts: Sequence[TokenisedPrompt], early: EarlyRows | None = None,
            crew: Crew | None = None) -> Judgement:
        """Hand the rows out: row i answers `prompts[batch.groups[i]]`. Every rank calls it, and none waits here but to
        learn which rows were handed in early, on which ranks of `crew`; these two are given together, on every rank.

        Raises:
            ValueError: no part scores a row's data source.
        """
        asked = self._asked(batch, prompts, early, crew)
        return Judgement(self, asked, [part.scorer.ask(rows) for part, rows in zip(self.parts, asked)])

    def close(self) -> None:
        """End the functions' workers."""
        for part in self.parts:
            part.scorer.close()

    def _asked(self, batch: Batch, prompts: Sequence[TokenisedPrompt], early: EarlyRows | None,
               crew: Crew | None) -> list[Asked]:
        sources = [prompts[group].record.data_source for group in batch.groups]
        for row, source in enumerate(sources):
            if not any(part.scores(source) for part in self.parts):
                raise ValueError(f"reward.mixture: no part scores the data source {source!r} (row {row}); name it in "
                                 "the data_sources of a part, or leave those of one empty")
        key, mine, elsewhere = next(self._keys), frozenset[int](), frozenset[int]()
        if early is not None and crew is not None:
            key, (mine, elsewhere) = early.key, handed_in(early.rows, batch.num_rows, crew)
        return [Asked(key, batch, prompts, tuple(row for row, source in enumerate(sources) if part.scores(source)),
                      mine, elsewhere) for part in self.parts]


def handed_in(rows: Collection[int], num_rows: int, crew: Crew) -> tuple[frozenset[int], frozenset[int]]:
    """Of the rows of a batch, those that were handed in on this rank, and on others. Collective over the crew."""
    table = torch.zeros(num_rows, dtype=torch.int64)
    table[list(rows)] = 1
    times = crew.sum(table.to(crew.world.device)).tolist()
    assert max(times, default=0) <= 1, "a row was handed in on two ranks"
    return frozenset(rows), frozenset(row for row, time in enumerate(times) if time) - frozenset(rows)


class Judgement:
    """A batch whose rows every part of `rewards` has been asked about. `work` and `result` follow in this order."""

    def __init__(self, rewards: Rewards, asked: Sequence[Asked], parts: Sequence[PartJudgement]) -> None:
        self._rewards, self._asked, self._parts = rewards, asked, parts

    def work(self) -> None:
        """This rank's part of what models do. Functions work by themselves."""
        for part in self._parts:
            part.work()

    def result(self, crew: Crew) -> tuple[Tensor, dict[str, float]]:
        """Scores `[rows]` fp64 on every rank of the crew, NaN where a part failed and its policy drops the row; and
        metrics. Collective over the crew.

        Raises:
            RewardFailed: a part failed, and its policy ends the run; on every rank alike.
        """
        parts, asked = self._rewards.parts, self._asked
        answers = [judgement.answer(crew) for judgement in self._parts]
        told = tell(crew, asked, answers, [part.policy for part in parts])
        for part, facts in zip(parts, told):
            require_going_on(facts, part.name)
        sentences = [sentence(facts, len(rows.rows), part.name, self._rewards.judged)
                     for part, facts, rows in zip(parts, told, asked)]
        self._rewards.last_fault = "; ".join(filter(None, sentences)) or None
        self._rewards.last_extras = _extras(answers)
        by_part = self._table(answers, crew)
        return self._total(by_part), self._metrics(told, by_part)

    def _table(self, answers: Sequence[Answer], crew: Crew) -> Tensor:
        """`[parts, rows]` fp64 on every rank: each part's score of its rows, 0 elsewhere."""
        table = torch.zeros(len(answers), self._asked[0].batch.num_rows, dtype=torch.float64)
        for place, (part, answer) in enumerate(zip(self._rewards.parts, answers)):
            for row, outcome in answer.outcomes.items():
                table[place, row] = part.policy.value(outcome)
        return crew.sum(table.to(crew.world.device))

    def _total(self, by_part: Tensor) -> Tensor:
        """`[rows]`: parts that have no weight are measured and cannot drop a row."""
        total = torch.zeros_like(by_part[0])
        for part, values in zip(self._rewards.parts, by_part):
            if part.weight:
                total += part.weight * values
        return total

    def _metrics(self, told: Sequence[Told], by_part: Tensor) -> dict[str, float]:
        metrics = {f"reward/faults_{kind.value}": float(sum(facts.faults[kind] for facts in told))
                   for kind in FaultKind}
        truncated = sum(facts.num_truncated for facts in told)
        if truncated:
            metrics["reward/truncated"] = float(truncated)
        for part, facts, values, rows in zip(self._rewards.parts, told, by_part, self._asked):
            inner = f"{part.name}_" if part.name else ""
            metrics |= {f"reward/extra_{inner}{name}": mean for name, mean in facts.extras.items()}
            known = values[list(rows.rows)]
            known = known[~known.isnan()]
            if part.name and known.numel():
                metrics[f"reward/part_{part.name}"] = known.mean().item()
        return metrics


def _extras(answers: Sequence[Answer]) -> dict[int, dict[str, Any]]:
    """By row, what all parts returned beside their scores; an earlier part's word holds."""
    found: dict[int, dict[str, Any]] = {}
    for answer in answers:
        for row, outcome in answer.outcomes.items():
            if isinstance(outcome, Score) and outcome.extras:
                found[row] = {**outcome.extras, **found.get(row, {})}
    return found
