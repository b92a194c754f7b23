"""What goes into a reward and what comes out: requests, scores, and faults by kind.

Owns the records and the rule for faulty rows. Runs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from math import isfinite
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RewardRequest:
    """One response to judge. Example: `RewardRequest("chain_sum", "12", "12", entry={"question": "5 + 7 =", ...})`.

    Attributes:
        data_source: where the prompt came from; a reasoning-gym task's name.
        solution: the decoded response, as generated.
        ground_truth: the right answer, in whatever form the data set has.
        extra_info: further data of the prompt, plain picklable values.
        entry: the generated entry of a reasoning-gym task (question, answer, metadata), None for other data.
    """

    data_source: str
    solution: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    entry: Mapping[str, Any] | None = None


class FaultKind(Enum):
    """Why a row has no score: the function raised, ran past the limit, returned NaN or infinity, returned something
    that is neither a number nor a dict with one under "score", or took its process down.
    """

    RAISED = "raised"
    TIMED_OUT = "timed_out"
    NOT_FINITE = "not_finite"
    WRONG_TYPE = "wrong_type"
    CRASHED = "crashed"


@dataclass(frozen=True)
class RowFault:
    """What went wrong in one row. Example: `RowFault(FaultKind.RAISED, "ValueError: no number (reward.py line 7)")`."""

    kind: FaultKind
    message: str


@dataclass(frozen=True)
class FaultCounts:
    """Rows without a score, by kind; counts of several ranks add up. Example: `FaultCounts(raised=1).total` is 1."""

    raised: int = 0
    timed_out: int = 0
    not_finite: int = 0
    wrong_type: int = 0
    crashed: int = 0

    @classmethod
    def of(cls, faults: Iterable[RowFault | None]) -> FaultCounts:
        return cls(**Counter(fault.kind.value for fault in faults if fault is not None))

    def __add__(self, other: FaultCounts) -> FaultCounts:
        mine, theirs = self.by_name(), other.by_name()
        return FaultCounts(**{name: mine[name] + theirs[name] for name in mine})

    def by_name(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def total(self) -> int:
        return sum(self.by_name().values())


@dataclass(frozen=True)
class Score:
    """A row's score and whatever else a dict-returning function reported. Example: `Score(1.0, {"format": 0.5})`."""

    value: float
    extras: Mapping[str, Any] = field(default_factory=dict)


Outcome = Score | RowFault


class OnFault(Enum):
    """What a faulty row does: stop the run, or stand with a stated reward (and its fault on record)."""

    RAISE = "raise"
    VALUE = "value"


@dataclass(frozen=True)
class FaultPolicy:
    """The rule for faulty rows. Examples: `FaultPolicy(OnFault.RAISE)`, `FaultPolicy(OnFault.VALUE, value=-1.0)`.

    Raises:
        ValueError: a value without `OnFault.VALUE`, or none or one that is not finite with it.
    """

    action: OnFault
    value: float | None = None

    def __post_init__(self) -> None:
        if (self.action is OnFault.VALUE) != (self.value is not None and isfinite(self.value)):
            raise ValueError(
                f"on_error {self.action.value} with value {self.value}: give a finite reward for faulty rows with "
                "on_error value, for example 0.0, and none with on_error raise"
            )


class RewardFault(RuntimeError):
    """Rows without a score where the policy is to raise; `counts` says how many of each kind."""

    def __init__(self, message: str, counts: FaultCounts) -> None:
        super().__init__(message)
        self.counts = counts


@dataclass(frozen=True)
class RewardResult:
    """Scores of the rows of one call.

    Attributes:
        scores: `[rows]` fp64, all finite; a faulty row holds the policy's value.
        extras: per row, what a dict-returning function gave beside "score"; empty for others and for faulty rows.
        row_faults: per row, None where the score is the function's.
    """

    scores: Tensor
    extras: tuple[Mapping[str, Any], ...]
    row_faults: tuple[RowFault | None, ...]

    @property
    def faults(self) -> FaultCounts:
        return FaultCounts.of(self.row_faults)

    @property
    def valid(self) -> Tensor:
        """`[rows]` bool: rows whose score is the function's."""
        return torch.tensor([fault is None for fault in self.row_faults], dtype=torch.bool)


def settle(requests: Sequence[RewardRequest], outcomes: Sequence[Outcome], policy: FaultPolicy) -> RewardResult:
    """The result of a call by the rule for faulty rows.

    Raises:
        RewardFault: a row is faulty and the policy is `OnFault.RAISE`; names the first such row and all counts.
    """
    faults = tuple(outcome if isinstance(outcome, RowFault) else None for outcome in outcomes)
    counts = FaultCounts.of(faults)
    if counts.total and policy.action is OnFault.RAISE:
        row, first = next((row, fault) for row, fault in enumerate(faults) if fault is not None)
        by_kind = ", ".join(f"{number} {name}" for name, number in counts.by_name().items() if number)
        raise RewardFault(
            f"the reward of {counts.total} of {len(faults)} rows failed ({by_kind}); first row {row} of data source "
            f"{requests[row].data_source!r}: {first.kind.value}: {first.message}",
            counts,
        )
    values = [outcome.value if isinstance(outcome, Score) else policy.value for outcome in outcomes]
    extras = tuple(outcome.extras if isinstance(outcome, Score) else {} for outcome in outcomes)
    return RewardResult(torch.tensor(values, dtype=torch.float64), extras, faults)
