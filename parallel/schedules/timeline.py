"""When every action of a schedule began and ended, and what follows from it: bubble, idle times, activations held.

Owns the record, which a simulation (`simulate`) and a measurement fill alike. It never times anything and never draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hybridflow.parallel.schedules.actions import COMPUTE, Action, Kind

PerChunk = float | tuple[float, ...]  # one number for all chunks, or one for each, by the chunk's number


class Span(NamedTuple):
    """One action in time, in seconds. Example: `Span(Action(Kind.F, 0, chunk=1), 0.5, 1.5)`.

    A send lasts as long as its message is on the link, a receive from its posting to the message's arrival.
    """

    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of every stage, each stage's in the order in which they began.

    F, B and W are what a stage is there for: these alone count as busy. The makespan is the time from the first start
    to the last end of them over all stages; reduces that are still under way, the optimizer step and the reshard come
    behind it and are part of `duration` alone. So the bubble fraction is that of the literature, 1F1B's
    (pp - 1) / (m + pp - 1) where all actions are equal, whatever an optimizer step costs.
    """

    stages: tuple[tuple[Span, ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def compute(self, stage: int) -> list[Span]:
        """The spans of F, B and W of a stage."""
        return [span for span in self.stages[stage] if span.action.kind in COMPUTE]

    @cached_property
    def start(self) -> float:
        """When the first computation starts, in seconds."""
        return min(span.start for span in self._all_compute())

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end of an F, B or W."""
        return max(span.end for span in self._all_compute()) - self.start

    @cached_property
    def duration(self) -> float:
        """Seconds from the first start of a computation to the last end of anything."""
        return max(span.end for spans in self.stages for span in spans) - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds of each stage spent in F, B and W."""
        return tuple(sum(span.duration for span in self.compute(stage)) for stage in range(self.num_stages))

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds of each stage within the makespan in which it computes nothing."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """1 - busy / (stages x makespan); 0 where nothing takes any time."""
        whole = self.num_stages * self.makespan
        return 1 - sum(self.busy) / whole if whole else 0.0

    def activations(self, stage: int, units: PerChunk = 1.0) -> list[tuple[float, float]]:
        """What a stage holds over time: pairs (seconds, held from then on), in order.

        A micro-batch's activations of a chunk are held from the start of its F to the end of its W, where it has one,
        else of its B.

        Args:
            units: what one micro-batch holds in a chunk, in bytes or in any other unit.
        """
        spans = self.compute(stage)
        split = {(span.action.index, span.action.chunk) for span in spans if span.action.kind is Kind.W}
        changes = []
        for action, start, end in spans:
            amount = per_chunk(units, action.chunk)
            if action.kind is Kind.F:
                changes.append((start, amount))
            elif action.kind is Kind.W or (action.index, action.chunk) not in split:
                changes.append((end, -amount))
        held, steps = 0.0, []
        for time, change in sorted(changes):  # what is let go at a time goes before what is taken then
            held += change
            steps.append((time, held))
        return steps

    def peak_activations(self, units: PerChunk = 1.0) -> tuple[float, ...]:
        """The most that each stage holds at any time, in `units` (see `activations`)."""
        return tuple(max((held for _, held in self.activations(stage, units)), default=0.0)
                     for stage in range(self.num_stages))

    def _all_compute(self) -> Iterator[Span]:
        for stage in range(self.num_stages):
            yield from self.compute(stage)


def per_chunk(value: PerChunk, chunk: int | None) -> float:
    """The number of one chunk."""
    if not isinstance(value, tuple):
        return value
    assert chunk is not None, value
    return value[chunk]
