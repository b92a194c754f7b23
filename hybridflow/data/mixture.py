"""Several sources of rows as one, drawn by weight.

Owns which source each place of the sequence is drawn from: a pure function of (seed, place). Every source has an epoch
and an order of its own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add
from typing import Any, Generic, TypeVar

from hybridflow.data.lengths import LengthCounts
from hybridflow.data.row_source import RowSource, State

Item = TypeVar("Item")


@dataclass(frozen=True)
class Draws:
    """The source of each place: of independent draws by weight, so that any stretch of places is a fair sample.

    Example: `Draws({"a": 1.0, "b": 0.0}, seed=0).source(7) == "a"`.
    """

    weights: Mapping[str, float]
    seed: int

    def source(self, place: int) -> str:
        ends = list(accumulate(self.weights.values()))
        point = random.Random(f"mixture {self.seed} {place}").random() * ends[-1]
        return next((name for name, end in zip(self.weights, ends) if point < end), list(self.weights)[-1])


class MixedLoader(Generic[Item]):
    """An endless sequence of batches of exactly `per_step` items out of several sources (a `RowLoader`)."""

    def __init__(self, sources: Mapping[str, RowSource[Item]], weights: Sequence[float], per_step: int, seed: int
                 ) -> None:
        """`weights`: of each source, relative to one another: its share of the items, whatever its size.

        Raises ValueError where a weight is not a finite number above 0, or there are no sources.
        """
        self.sources, self.per_step, self.place = dict(sources), per_step, 0
        given = dict(zip(self.sources, weights, strict=True))
        wrong = {name: weight for name, weight in given.items() if not 0 < weight < float("inf")}
        if wrong or not given:
            raise ValueError(f"the weights of a mixture must be finite numbers above 0, got {wrong or 'none'}")
        self.draws = Draws(given, seed)

    @property
    def num_rows(self) -> int:
        return sum(source.num_rows for source in self.sources.values())

    @property
    def counts(self) -> LengthCounts:
        return reduce(add, (source.counts for source in self.sources.values()))

    @property
    def epoch(self) -> int:
        """How often every source has been gone through at least."""
        return min(source.epoch for source in self.sources.values())

    def __iter__(self) -> MixedLoader[Item]:
        return self

    def __next__(self) -> tuple[Item, ...]:
        """The items of the next step."""
        return self.take(self.per_step)

    def take(self, count: int) -> tuple[Item, ...]:
        """The next `count` items, in the order drawn."""
        names = [self.draws.source(place) for place in range(self.place, self.place + count)]
        taken = {name: iter(self.sources[name].take(number)) for name, number in sorted(Counter(names).items())}
        self.place += count
        return tuple(next(taken[name]) for name in names)

    def state_dict(self) -> State:
        """The next place, and the position of every source by its name (each with the seed that all share)."""
        return {"place": self.place, "sources": {name: one.state_dict() for name, one in self.sources.items()}}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`. Raises ValueError if it is of other sources."""
        saved: Mapping[str, Any] = state["sources"]
        if set(saved) != set(self.sources):
            raise ValueError(f"the saved position is of the sources {', '.join(saved)}, and this mixture has "
                             f"{', '.join(self.sources)}; resume with the data that the run was started with")
        self.place = state["place"]
        for name, source in self.sources.items():
            source.load_state_dict(saved[name])
