"""The rewards of a run: each part asked for its rows, the weighted sum over parts, one table on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.parallel.world import World
from hybridflow.rewards.policy import FaultPolicy
from hybridflow.rewards.records import FaultKind
from hybridflow.trainer.rewards.part import Answer, Asked, RewardPart
from hybridflow.trainer.rewards.report import Told, require_going_on, sentence, tell
from hybridflow.trainer.roles import sum_over_world


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

    def submit(self, row: int, prompt: TokenisedPrompt, response: Sequence[int]) -> None:
        """Let functions begin with `row`, as the batch will number it. Returns at once; not collective."""
        for part in self.parts:
            if part.scores(prompt.record.data_source):
                part.scorer.submit(self.key, row, prompt, response)
        self.rows.add(row)


class Rewards:
    """Where scores come from.

    Attributes:
        right_score: that of a right answer; None where no answer is simply right, as in a sum.
        last_fault: what went wrong in the last `score`, the same sentence on every rank; None if nothing did.
    """

    def __init__(self, parts: Sequence[WeightedPart], world: World) -> None:
        self.parts, self.world = tuple(parts), world
        self.right_score = parts[0].scorer.right_score if len(parts) == 1 else None
        self.last_fault: str | None = None
        self._keys = count()

    def begin(self) -> EarlyRows:
        """A place for rows as they are generated, to be given to `score` with the whole batch."""
        return EarlyRows(next(self._keys), self.parts)

    def score(self, batch: Batch, prompts: Sequence[TokenisedPrompt],
              early: EarlyRows | None = None) -> tuple[Tensor, dict[str, float]]:
        """Scores `[rows]` fp64 on every rank, NaN where a part failed and its policy drops the row; and metrics.
        Collective; `early` is given on every rank or on none.

        Raises:
            RewardFailed: a part failed, and its policy ends the run; on every rank alike.
            ValueError: no part scores a row's data source.
        """
        asked = self._asked(batch, prompts, early)
        for part, rows in zip(self.parts, asked):
            part.scorer.begin(rows)
        answers: dict[int, Answer] = {}
        for place in sorted(range(len(self.parts)), key=lambda place: self.parts[place].scorer.runs_beside):
            answers[place] = self.parts[place].scorer.finish(asked[place])
        in_order = [answers[place] for place in range(len(self.parts))]
        told = tell(self.world, asked, in_order, [part.policy for part in self.parts])
        for part, facts in zip(self.parts, told):
            require_going_on(facts, part.name)
        sentences = [sentence(facts, len(rows.rows), part.name)
                     for part, facts, rows in zip(self.parts, told, asked)]
        self.last_fault = "; ".join(filter(None, sentences)) or None
        by_part = self._table(in_order, batch.num_rows)
        return self._total(by_part), self._metrics(told, by_part, asked)

    def close(self) -> None:
        """End the functions' workers."""
        for part in self.parts:
            part.scorer.close()

    def _asked(self, batch: Batch, prompts: Sequence[TokenisedPrompt], early: EarlyRows | None) -> list[Asked]:
        sources = [prompts[group].record.data_source for group in batch.groups]
        for row, source in enumerate(sources):
            if not any(part.scores(source) for part in self.parts):
                raise ValueError(f"reward.mixture: no part scores the data source {source!r} (row {row}); name it in "
                                 "the data_sources of a part, or leave those of one empty")
        key = next(self._keys) if early is None else early.key
        mine, elsewhere = self._handed_in(batch.num_rows, early)
        return [Asked(key, batch, prompts, tuple(row for row, source in enumerate(sources) if part.scores(source)),
                      mine, elsewhere) for part in self.parts]

    def _handed_in(self, num_rows: int, early: EarlyRows | None) -> tuple[frozenset[int], frozenset[int]]:
        """The rows that were handed in on this rank, and on others."""
        if early is None:
            return frozenset(), frozenset()
        table = torch.zeros(num_rows, dtype=torch.int64)
        table[list(early.rows)] = 1
        times = sum_over_world(table.to(self.world.device), self.world).tolist()
        assert max(times, default=0) <= 1, "a row was handed in on two ranks"
        return frozenset(early.rows), frozenset(row for row, time in enumerate(times) if time) - early.rows

    def _table(self, answers: Sequence[Answer], num_rows: int) -> Tensor:
        """`[parts, rows]` fp64 on every rank: each part's score of its rows, 0 elsewhere."""
        table = torch.zeros(len(self.parts), num_rows, dtype=torch.float64)
        for place, (part, answer) in enumerate(zip(self.parts, answers)):
            for row, outcome in answer.outcomes.items():
                table[place, row] = part.policy.value(outcome)
        return sum_over_world(table.to(self.world.device), self.world)

    def _total(self, by_part: Tensor) -> Tensor:
        """`[rows]`: parts that have no weight are measured and cannot drop a row."""
        total = torch.zeros_like(by_part[0])
        for part, values in zip(self.parts, by_part):
            if part.weight:
                total += part.weight * values
        return total

    def _metrics(self, told: Sequence[Told], by_part: Tensor, asked: Sequence[Asked]) -> dict[str, float]:
        metrics = {f"reward/faults_{kind.value}": float(sum(facts.faults[kind] for facts in told))
                   for kind in FaultKind}
        truncated = sum(facts.num_truncated for facts in told)
        if truncated:
            metrics["reward/truncated"] = float(truncated)
        for part, facts, values, rows in zip(self.parts, told, by_part, asked):
            inner = f"{part.name}_" if part.name else ""
            metrics |= {f"reward/extra_{inner}{name}": mean for name, mean in facts.extras.items()}
            known = values[list(rows.rows)]
            known = known[~known.isnan()]
            if part.name and known.numel():
                metrics[f"reward/part_{part.name}"] = known.mean().item()
        return metrics
