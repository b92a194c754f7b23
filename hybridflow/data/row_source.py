"""What a source of training rows is: an endless sequence with a position that can be saved.

Owns the interface, the numbering of rows over several sources, and what a source tells about itself. Reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hybridflow.data.lengths import LengthCounts

Item = TypeVar("Item", covariant=True)
State = dict[str, Any]  # of what JSON knows


@dataclass(frozen=True)
class Numbering:
    """Ids that are unique over the run and its sources: epoch * total + first + row.

    So a row has another id, and therefore other samples, in each epoch, but never another one because the data was
    shuffled otherwise, or because other rows were dropped. Example: `Numbering(first=10, total=15).id(2, 3) == 43`.
    """

    first: int
    total: int

    def id(self, epoch: int, row: int) -> int:
        return epoch * self.total + self.first + row


class RowSource(Protocol[Item]):
    """An endless sequence of items, the same on every rank that makes the same source.

    Attributes:
        num_rows: rows of one epoch, dropped ones included.
        counts: rows that were too long: of all rows, or of those met so far where rows are read as they are needed.
        epoch: how often all rows have been gone through.
    """

    @property
    def num_rows(self) -> int: ...

    @property
    def counts(self) -> LengthCounts: ...

    @property
    def epoch(self) -> int: ...

    def take(self, count: int) -> tuple[Item, ...]:
        """The next `count` items."""
        ...

    def state_dict(self) -> State:
        """The position of the next item."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Go on from a saved position: what follows equals what followed there. Raises ValueError if there is none."""
        ...


class RowLoader(RowSource[Item], Protocol[Item]):
    """A source that also knows how many items a step takes."""

    def __next__(self) -> tuple[Item, ...]:
        """The items of the next step."""
        ...
