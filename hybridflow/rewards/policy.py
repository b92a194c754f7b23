"""What becomes of a row whose reward failed: it is dropped, it gets a score that was named for it, or the run ends.

Owns the choice. The fault is counted and told whatever is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from hybridflow.rewards.records import FaultKind, Outcome, RowFault, Score


class Consequence(Enum):
    """DROP: the row has no score and is not trained. ERROR: the run ends, on every rank."""

    DROP = "drop"
    ERROR = "error"


class RewardFailed(Exception):
    """A reward failed in a way that ends the run; the message says in which row, of which data source, and how."""


@dataclass(frozen=True)
class FaultPolicy:
    """By cause, a consequence or the score. Example: `FaultPolicy({FaultKind.RAISED: Consequence.ERROR})`; causes that
    are not named drop the row.
    """

    actions: Mapping[FaultKind, Consequence | float]

    def value(self, outcome: Outcome) -> float:
        """The row's score; NaN where it has none."""
        if isinstance(outcome, Score):
            return outcome.value
        action = self._action(outcome)
        return float("nan") if isinstance(action, Consequence) else action

    def ends_run(self, fault: RowFault) -> bool:
        """Whether no run goes on after this."""
        return self._action(fault) is Consequence.ERROR

    def _action(self, fault: RowFault) -> Consequence | float:
        return self.actions.get(fault.kind, Consequence.DROP)
