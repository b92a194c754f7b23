"""What goes into a reward and what comes out: requests, scores, and faults by kind.

Owns the records. Runs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
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
    that is neither a number nor a dict with one under "score", took its process down, or wanted more memory than there
    was (it raised MemoryError, or the kernel ended its process).
    """

    RAISED = "raised"
    TIMED_OUT = "timed_out"
    NOT_FINITE = "not_finite"
    WRONG_TYPE = "wrong_type"
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True)
class RowFault:
    """What went wrong in one row. Example: `RowFault(FaultKind.RAISED, "ValueError: no number (reward.py line 7)")`."""

    kind: FaultKind
    message: str


@dataclass(frozen=True)
class Score:
    """A row's score and whatever else a dict-returning function reported. Example: `Score(1.0, {"format": 0.5})`."""

    value: float
    extras: Mapping[str, Any] = field(default_factory=dict)


Outcome = Score | RowFault


@dataclass(frozen=True)
class RewardResult:
    """What the rows of one call gave. Example: `RewardResult.of([Score(1.0), RowFault(FaultKind.RAISED, "...")])`.

    Attributes:
        scores: `[rows]` fp64, NaN for a faulty row and only there.
        extras: per row, what a dict-returning function gave beside "score"; empty for others and for faulty rows.
        row_faults: per row, None where there is a score.
    """

    scores: Tensor
    extras: tuple[Mapping[str, Any], ...]
    row_faults: tuple[RowFault | None, ...]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> RewardResult:
        """The result of a call whose rows had these outcomes."""
        values = [outcome.value if isinstance(outcome, Score) else float("nan") for outcome in outcomes]
        return cls(
            torch.tensor(values, dtype=torch.float64),
            tuple(outcome.extras if isinstance(outcome, Score) else {} for outcome in outcomes),
            tuple(outcome if isinstance(outcome, RowFault) else None for outcome in outcomes),
        )

    @property
    def faults(self) -> Counter[FaultKind]:
        """Rows without a score, by kind; kinds that did not occur are not in it, and read as 0."""
        return Counter(fault.kind for fault in self.row_faults if fault is not None)

    def fault_sentence(self, rows: Sequence[RewardRequest]) -> str | None:
        """What went wrong, for the user, None if nothing did. `rows` are those of the call."""
        first = next(((row, fault) for row, fault in enumerate(self.row_faults) if fault is not None), None)
        if first is None:
            return None
        row, fault = first
        return fault_sentence(self.faults, len(self.row_faults), row, rows[row].data_source, fault.message)


def fault_sentence(faults: Mapping[FaultKind, int], num_rows: int, row: int, data_source: str, message: str,
                   judged: str = "reward") -> str:
    """One sentence on the faults of `num_rows` rows, of which `row` is the first. `judged`: what they should have got.

    Example: "3 of 128 rewards failed (2 raised, 1 timed_out); first: row 7 of data source 'sums': ValueError: no number
    (reward.py line 7)".
    """
    by_kind = ", ".join(f"{faults[kind]} {kind.value}" for kind in FaultKind if faults.get(kind))
    message = " ".join(message.split())  # an error of several lines makes one sentence
    return (f"{sum(faults.values())} of {num_rows} {judged}s failed ({by_kind}); first: row {row} of data source "
            f"{data_source!r}: {message}")
