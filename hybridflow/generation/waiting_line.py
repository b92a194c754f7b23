"""The sequences that wait for a row, oldest first, and which of them a group of the pipeline should take.

Owns the order of the line and the balance between groups. It never looks at blocks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Many
from dataclasses import dataclass

from hybridflow.generation.sequence import Sequence


class WaitingLine:
    """Sequences in the order of their serial numbers: one that comes back is in front of all younger ones."""

    def __init__(self) -> None:
        self._line: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._line)

    def __getitem__(self, place: int) -> Sequence:
        return self._line[place]

    def add(self, sequence: Sequence) -> None:
        insort(self._line, sequence, key=lambda waiting: waiting.serial)

    def siblings(self, place: int, most: int) -> list[Sequence]:
        """The sequences from `place` on that have the same prompt to compute, at most `most`."""
        first = self._line[place]
        end = place + 1
        while end < min(place + most, len(self._line)) and self._line[end].prompt == first.prompt:
            end += 1
        return self._line[place:end]

    def remove(self, place: int, count: int) -> None:
        del self._line[place : place + count]

    def clear(self) -> list[Sequence]:
        line, self._line = self._line, []
        return line


@dataclass
class Load:
    """What a group has at work. Example: `Load(rows=3, tokens=700)`."""

    rows: int
    tokens: int

    def add(self, sequences: Many[Sequence]) -> None:
        self.rows += len(sequences)
        self.tokens += sum(len(sequence.prompt) for sequence in sequences)


def next_group(loads: Many[Load], most_rows: int, asking: int) -> int | None:
    """The group that the next sequences of the line belong to: the one with the least work; None if all are full.

    A step of a pipeline is as slow as its slowest group, and a row costs its share of the weights' products and of the
    cache's reads: the measure is the sum of a group's share of all rows and of all tokens. Groups of equal load leave
    it to the one that asks.

    Args:
        most_rows: of a group.
    """
    rows = max(1, sum(load.rows for load in loads))
    tokens = max(1, sum(load.tokens for load in loads))
    return min((group for group, load in enumerate(loads) if load.rows < most_rows), default=None,
               key=lambda g: (loads[g].rows * tokens + loads[g].tokens * rows, g != asking, g))
