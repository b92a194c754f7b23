"""How long each phase of a training step takes.

Owns the phase names and the stop-watch of this rank. Seconds become the metrics `time/<phase>` and `time/step`; the
same blocks become spans of the trace. It never reduces over ranks: the numbers logged are those of rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from hybridflow.observe.trace import Trace, TraceCategory


class Phase(Enum):
    """A part of the step. Its value is its name in metrics and traces."""

    RESHARD = "reshard"
    GENERATE = "generate"
    REWARD = "reward"
    REFERENCE = "reference"
    VALUES = "values"
    LOG_PROBS = "log_probs"
    UPDATE_CRITIC = "update_critic"
    UPDATE_ACTOR = "update_actor"
    EVALUATE = "evaluate"


class PhaseTimer:
    """Seconds per phase of one step. Example:

        with timer.step():
            with timer.phase(Phase.GENERATE):
                ...
        metrics |= timer.take()     # {"time/generate": 1.2, "time/step": 1.3}

    A phase entered inside another counts for itself only, so the phases of a step never add up to more than the step.
    A phase entered several times adds up. Evaluation is apart: `time/step` leaves it out (most steps do not evaluate),
    and phases inside it (its own generation) count as evaluation.

    Attributes:
        clock: gives seconds. Another one, of CPU seconds say, may take its place between two steps.
    """

    def __init__(self, trace: Trace, settle: Callable[[], None] | None = None,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        """`settle` waits for the device at both edges of a phase (see `trace.settle_device`); None on the CPU."""
        self._trace = trace
        self._settle = settle
        self.clock = clock
        self._seconds: dict[Phase, float] = {}
        self._open: list[_OpenPhase] = []
        self._in_step = False
        self._step_seconds = 0.0

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Time the block, also where it raises."""
        if any(outer.phase is Phase.EVALUATE for outer in self._open):
            with self._trace.span(phase.value, TraceCategory.PHASES):
                yield
            return
        entered = _OpenPhase(phase, self._now())
        self._open.append(entered)
        try:
            with self._trace.span(phase.value, TraceCategory.PHASES):
                yield
        finally:
            self._open.pop()
            self._count(entered, self._now() - entered.start)

    def _count(self, entered: _OpenPhase, seconds: float) -> None:
        own = seconds - entered.inner_seconds
        self._seconds[entered.phase] = self._seconds.get(entered.phase, 0.0) + own
        if self._open:
            self._open[-1].inner_seconds += seconds
        if entered.phase is Phase.EVALUATE and self._in_step:
            self._step_seconds -= seconds

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a whole training step."""
        start = self._now()
        self._in_step = True
        try:
            with self._trace.span("step", TraceCategory.PHASES):
                yield
        finally:
            self._in_step = False
            self._step_seconds += self._now() - start

    def take(self) -> dict[str, float]:
        """The metrics of what was timed since the last call, in seconds. Call it once a step, outside of `step()`."""
        metrics = {f"time/{phase.value}": seconds for phase, seconds in self._seconds.items()}
        metrics["time/step"] = self._step_seconds
        self._seconds = {}
        self._step_seconds = 0.0
        return metrics

    def _now(self) -> float:
        if self._settle is not None:
            self._settle()
        return self.clock()


@dataclass
class _OpenPhase:
    phase: Phase
    start: float
    inner_seconds: float = 0.0  # time that phases inside this one took
