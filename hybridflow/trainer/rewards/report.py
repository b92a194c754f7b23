"""What every rank is told of a scoring: metrics, a sentence on faults, and the end of the run where a policy says so.

Owns the exchange of small facts and what is made of them. Scores themselves are not its business.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.crew import Crew
from hybridflow.rewards.policy import FaultPolicy, RewardFailed
from hybridflow.rewards.records import FaultKind, RowFault, Score, fault_sentence
from hybridflow.trainer.rewards.part import Answer, Asked


@dataclass(frozen=True)
class Told:
    """Of one part, on all ranks.

    Attributes:
        faults: rows without a score of the part's own, by kind.
        first, fatal: [row, data source, message] of the first such row, and of the first that ends the run; None
            without one.
        num_truncated: rows that were too long for the part's model.
        extras: means of the further numbers that it returned.
    """

    faults: Counter[FaultKind]
    first: Sequence[Any] | None
    fatal: Sequence[Any] | None
    num_truncated: int
    extras: dict[str, float]


def tell(crew: Crew, asked: Sequence[Asked], answers: Sequence[Answer],
         policies: Sequence[FaultPolicy]) -> list[Told]:
    """What became of the rows of each part, the same on every rank. Collective over the crew."""
    mine = [_facts(*part) for part in zip(asked, answers, policies, strict=True)]
    return [_together(ranks) for ranks in zip(*crew.share(mine))]


def _facts(asked: Asked, answer: Answer, policy: FaultPolicy) -> dict[str, Any]:
    """This rank's facts on a part, as JSON can carry them."""
    failed = {row: outcome for row, outcome in sorted(answer.outcomes.items()) if isinstance(outcome, RowFault)}
    told = [[row, asked.prompt(row).record.data_source, f"{fault.message}"] for row, fault in failed.items()]
    fatal = [fact for fact, fault in zip(told, failed.values()) if policy.ends_run(fault)]
    extras: dict[str, list[float]] = defaultdict(list)
    for outcome in answer.outcomes.values():
        for name, value in (outcome.extras.items() if isinstance(outcome, Score) else ()):
            # Finite numbers have a mean; a scorer may report what it likes beside its score.
            if isinstance(value, (int, float)) and abs(value) <= sys.float_info.max:  # false for NaN
                extras[name].append(float(value))
    return {"faults": Counter(fault.kind.value for fault in failed.values()), "first": told[:1], "fatal": fatal[:1],
            "truncated": answer.num_truncated,
            "extras": {name: [sum(values), len(values)] for name, values in extras.items()}}


def _together(ranks: Sequence[dict[str, Any]]) -> Told:
    faults: Counter[FaultKind] = Counter()
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for facts in ranks:
        faults.update({FaultKind(kind): count for kind, count in facts["faults"].items()})
        for name, (total, count) in facts["extras"].items():
            sums[name] = [sums[name][0] + total, sums[name][1] + count]
    return Told(faults, _earliest(ranks, "first"), _earliest(ranks, "fatal"),
                sum(facts["truncated"] for facts in ranks),
                {name: total / count for name, (total, count) in sums.items()})


def _earliest(ranks: Sequence[dict[str, Any]], name: str) -> Sequence[Any] | None:
    return min((fact for facts in ranks for fact in facts[name]), key=lambda fact: fact[0], default=None)


def sentence(told: Told, num_rows: int, part: str, judged: str) -> str | None:
    """On the faults of a part (its name, "" if it is the only one) that should have given each row a reward, or what
    `judged` calls it; None if there are none.
    """
    if told.first is None:
        return None
    return _prefix(part) + fault_sentence(told.faults, num_rows, *told.first, judged=judged)


def require_going_on(told: Told, part: str) -> None:
    """
    Raises:
        RewardFailed: a row failed in a way that ends the run; on every rank alike.
    """
    if told.fatal is not None:
        row, data_source, message = told.fatal
        raise RewardFailed(f"{_prefix(part)}the reward of row {row} (data source {data_source!r}) failed, and "
                           f"reward.on_fault ends the run: {' '.join(message.split())}")


def _prefix(part: str) -> str:
    return f"reward part {part}: " if part else ""
