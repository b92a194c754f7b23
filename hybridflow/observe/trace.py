"""Recording what one rank does when: spans of time, kept in memory.

Owns the recorder of this rank. It never talks to other ranks and writes no file: see `trace_gather` and `trace_file`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import NamedTuple

import torch


class TraceCategory(Enum):
    """Which lane of its rank a span belongs to. Spans of one category on one rank nest, they never overlap in part."""

    PHASES = "phases"
    PIPELINE = "pipeline"
    RESHARD = "reshard"


class TraceEvent(NamedTuple):
    """One finished span. Example: `TraceEvent("F 0", TraceCategory.PIPELINE, 1_000, 250)`, both in nanoseconds."""

    name: str
    category: TraceCategory
    start_ns: int
    duration_ns: int


_NOTHING = contextlib.nullcontext()


class Trace:
    """The spans of one rank. Records only between `start` and `stop`; a span costs one branch at any other time.

    Times are those of the host. On an accelerator the host runs ahead of the device, so `settle` (see `settle_device`)
    is called at both edges of every recorded span: the lanes then show device work, and the traced step is slower
    than the others because no computation overlaps across a span's edge. Messages and reductions go on beside it.
    """

    def __init__(self, settle: Callable[[], None] | None = None) -> None:
        """`settle` waits for the device's queued work; None where the host does the work itself."""
        self.events: list[TraceEvent] = []
        self.recording = False
        self._settle = settle

    def start(self) -> None:
        """Forget what was recorded and record from here on."""
        self.events = []
        self.recording = True

    def stop(self) -> None:
        """Record no more; `events` stays readable."""
        self.recording = False

    def span(self, name: str, category: TraceCategory) -> contextlib.AbstractContextManager[object]:
        """Record the time spent inside the `with` block, also where it raises."""
        return _Span(self, name, category) if self.recording else _NOTHING

    def lane(self, category: TraceCategory) -> Lane:
        """This trace seen as one category, for code that must not know the categories (all of `parallel`)."""
        return Lane(self, category)

    def now_ns(self) -> int:
        """The clock of the events, after the device has settled."""
        if self._settle is not None:
            self._settle()
        return time.perf_counter_ns()


class Lane:
    """One category of a trace. Example: `with lane.span("F 3"): ...`."""

    def __init__(self, trace: Trace, category: TraceCategory) -> None:
        self._trace = trace
        self._category = category

    def span(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Record the time spent inside the `with` block."""
        return self._trace.span(name, self._category)


class _Span:
    __slots__ = ("_category", "_name", "_start_ns", "_trace")

    def __init__(self, trace: Trace, name: str, category: TraceCategory) -> None:
        self._trace = trace
        self._name = name
        self._category = category

    def __enter__(self) -> None:
        self._start_ns = self._trace.now_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        duration_ns = self._trace.now_ns() - self._start_ns
        self._trace.events.append(TraceEvent(self._name, self._category, self._start_ns, duration_ns))


def settle_device(device: torch.device) -> Callable[[], None] | None:
    """What waits for `device` to finish its queued computation; None for the CPU, which has no queue.

    Never for all of the device: a receive that was posted early ends when another rank sends, and that rank may be
    waiting for what this one does next.
    """
    if device.type == "cpu":
        return None
    return lambda: torch.accelerator.current_stream(device).synchronize()
