"""The order in which rows of files are visited that are too large for memory: blocks shuffled, then a shuffle buffer.

Owns order and position, over row numbers alone: a pure function of (block sizes, seed, buffer), so that a saved
position is two numbers. Never reads a row.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, chain, count, islice

from hybridflow.data.epoch_order import Visit, checked_position, epoch_order


class StreamCursor:
    """Walks epoch after epoch without end.

    Rows come block by block, the blocks in `epoch_order`; `buffer` of them wait, the next visit is drawn from these,
    and the next row takes its place. Each row is visited once an epoch.

    Example: blocks (2, 2) with a buffer of 1 are visited 0, 1, 2, 3 or 2, 3, 0, 1.
    """

    def __init__(self, blocks: Sequence[int], seed: int, shuffle: bool, buffer: int) -> None:
        """`blocks`: rows of each block. Without shuffle rows are visited as they lie, and one waits.

        Raises ValueError if there are no rows, or buffer is below 1.
        """
        self.num_rows = sum(blocks)
        if self.num_rows < 1:
            raise ValueError("there are no rows to walk through; the data set is empty")
        if buffer < 1:
            raise ValueError(f"the shuffle buffer has {buffer} rows; it must have at least 1")
        self.starts, self.seed, self.shuffle = (0, *accumulate(blocks)), seed, shuffle
        self.buffer = buffer if shuffle else 1
        self._seek(0, 0)

    def take(self) -> Visit:
        """The next visit, of a row that waits."""
        row, arrived = self._draw()
        visit = Visit(self.epoch, row)
        self._arrived += arrived
        self.index += 1
        if self.index == self.num_rows:
            self._seek(self.epoch + 1, 0)
        return visit

    def arrivals(self) -> list[int]:
        """The rows that have come to wait since the last call, in the order of reading; after a jump all that wait."""
        arrived, self._arrived = sorted(self._arrived), []
        return [row for _, row in arrived]

    def state_dict(self) -> dict[str, int]:
        """`index` visits of `epoch` have been made. Example: {"seed": 0, "epoch": 0, "index": 6}."""
        return {"seed": self.seed, "epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a saved position; about a second for each million visits of its epoch.

        Raises ValueError if this data has no such position, or its order another seed.
        """
        self._seek(*checked_position(state, self.num_rows, self.seed))

    def _seek(self, epoch: int, index: int) -> None:
        order = epoch_order(len(self.starts) - 1, self.seed, epoch, self.shuffle)
        rows = chain.from_iterable(range(self.starts[block], self.starts[block + 1]) for block in order)
        self._upcoming = zip(count(), rows)
        self._waiting = list(islice(self._upcoming, self.buffer))
        self._draws = random.Random(f"shuffle buffer {self.seed} {epoch}")  # see epoch_order on what Python promises
        self.epoch, self.index = epoch, index
        for _ in range(index):
            self._draw()
        self._arrived = list(self._waiting)

    def _draw(self) -> tuple[int, list[tuple[int, int]]]:
        """A row that waited, and what has come to wait in its place, with its number: nothing at an epoch's end."""
        place = int(self._draws.random() * len(self._waiting))
        _, row = self._waiting[place]
        following = next(self._upcoming, None)
        if following is None:
            self._waiting[place] = self._waiting[-1]
            self._waiting.pop()
            return row, []
        self._waiting[place] = following
        return row, [following]
