"""The order in which rows are visited: a pure function of (seed, epoch), and a cursor that walks it.

Owns order and position. Never sees a record or a token, and holds no generator state that would have to be saved.
"""

import random
from dataclasses import dataclass


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> tuple[int, ...]:
    """The rows of one epoch, each once. Same arguments, same order, on every machine and Python version.

    Random.random() is the one generator method whose sequence Python promises to keep, so rows are sorted by its draws.
    Example: epoch_order(4, seed=0, epoch=0, shuffle=False) == (0, 1, 2, 3)
    """
    if not shuffle:
        return tuple(range(num_rows))
    generator = random.Random(f"epoch order {seed} {epoch}")
    draws = [generator.random() for _ in range(num_rows)]
    return tuple(sorted(range(num_rows), key=draws.__getitem__))


@dataclass(frozen=True)
class Visit:
    """One row in one epoch. Example: Visit(epoch=1, row=3) is the second time that row 3 is used."""

    epoch: int
    row: int


def checked_position(state: dict[str, int], num_rows: int, seed: int) -> tuple[int, int]:
    """Epoch and index of a saved position.

    Raises ValueError if data of `num_rows` rows have no such position, or it was saved under another seed.
    """
    epoch, index = state["epoch"], state["index"]
    if state["seed"] != seed:
        raise ValueError(f"the data position was saved under train.seed {state['seed']}, and this run has {seed}: "
                         f"their orders differ; resume with train.seed {state['seed']}")
    if epoch < 0 or not 0 <= index < num_rows:
        raise ValueError(f"data position epoch {epoch}, index {index} is outside this data of {num_rows} rows; "
                         "resume with the data that the run was started with")
    return epoch, index


class EpochCursor:
    """Walks epoch after epoch without end; a batch may hold the end of one epoch and the start of the next.

    So all batches have the same number of rows, no row is left out, and a step never shrinks at an epoch's end.
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool) -> None:
        """num_rows must be positive (ValueError)."""
        if num_rows < 1:
            raise ValueError("there are no rows to walk through; the data set is empty")
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self._seek(0, 0)

    def take(self, count: int) -> tuple[Visit, ...]:
        """The next `count` visits."""
        visits = []
        for _ in range(count):
            visits.append(Visit(self.epoch, self.order[self.index]))
            self.index += 1
            if self.index == self.num_rows:
                self._seek(self.epoch + 1, 0)
        return tuple(visits)

    def state_dict(self) -> dict[str, int]:
        """Where the next batch starts: `index` rows into `epoch`. Example: {"seed": 0, "epoch": 0, "index": 6}."""
        return {"seed": self.seed, "epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a saved position. Raises ValueError if this data has no such position, or its order another seed.
        """
        self._seek(*checked_position(state, self.num_rows, self.seed))

    def _seek(self, epoch: int, index: int) -> None:
        self.epoch = epoch
        self.index = index
        self.order = epoch_order(self.num_rows, self.seed, epoch, self.shuffle)
