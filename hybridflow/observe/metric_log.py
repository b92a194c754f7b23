"""Where metrics go: one log that fans out to sinks, on rank 0.

Owns the sink protocol and the sink of metrics.jsonl. wandb and TensorBoard each live in a module of their own.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from hybridflow.observe.jsonl import JsonlFile, read_jsonl
from hybridflow.observe.metric_names import check_names, find_metric, unknown_sentence

Say = Callable[[str], None]  # prints one sentence, from rank 0
Renamed = Callable[[int, dict[str, float]], dict[str, float]]  # of a step's number and metrics


class MetricSink(Protocol):
    """What takes the metrics of a run."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Take the metrics of one step. A step is logged at most once, steps rise."""

    def close(self) -> None:
        """Finish writing. Nothing is logged afterwards."""


class MetricLog:
    """Hands every step's metrics to every sink. A rank without sinks (all but rank 0) does nothing.

    Example: `MetricLog([JsonlSink(path, say, resume=False)], say).log(3, {"reward/mean": 0.5})`.
    """

    def __init__(self, sinks: Sequence[MetricSink], say: Say, *, strict: bool = False,
                 renamed: Renamed | None = None) -> None:
        """`strict` (tests) refuses metrics that are not in the table; otherwise each is announced once and logged.
        `renamed` gives a step's metrics under further names, which are logged too; None adds none.
        """
        self._sinks = tuple(sinks)
        self._say = say
        self._strict = strict
        self._renamed = renamed
        self._announced: set[str] = set()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log one step.

        Raises:
            ValueError: strict, and a metric is not in the table of `metric_names`.
        """
        if not self._sinks:
            return
        self._check(metrics)
        if self._renamed is not None:
            metrics = metrics | self._renamed(step, metrics)
        for sink in self._sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()

    def _check(self, metrics: dict[str, float]) -> None:
        if self._strict:
            check_names(metrics)
        for name in metrics.keys() - self._announced:
            if find_metric(name) is None:
                self._say(f"Logged all the same: {unknown_sentence(name)}.")
            self._announced.add(name)


class JsonlSink:
    """metrics.jsonl: a line `{"step": 3, "unix_time": ..., "reward/mean": 0.5, ...}` for each step.

    A value that is not finite is written as null, counted, and told once for each metric and again at the end.
    """

    def __init__(self, path: Path, say: Say, *, resume: bool) -> None:
        """Append to `path` if `resume`, else begin anew (see `JsonlFile`)."""
        self._file = JsonlFile(path, resume=resume)
        self._say = say
        self.not_finite: Counter[str] = Counter()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append and flush one line."""
        for name, value in metrics.items():
            if not math.isfinite(value):
                self._count(step, name, value)
        values = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write({"step": step, "unix_time": time.time(), **values})

    def close(self) -> None:
        """Close the file and tell how many values were not finite, if any."""
        self._file.close()
        if self.not_finite:
            counts = ", ".join(f"{name} {count}" for name, count in sorted(self.not_finite.items()))
            self._say(f"{self.not_finite.total()} values of metrics were not finite: {counts}.")

    def _count(self, step: int, name: str, value: float) -> None:
        if name not in self.not_finite:
            self._say(f"{name} is {value} at step {step}: metrics.jsonl has null there.")
        self.not_finite[name] += 1


MetricRecord = dict[str, float | None]  # one line of metrics.jsonl; None where the value was not finite


def read_metrics(path: Path) -> list[MetricRecord]:
    """The lines of a metrics.jsonl, one for each step, in order of steps.

    A run that was resumed from an earlier step has logged some steps twice; the later line stands.
    """
    by_step = {record["step"]: record for record in read_jsonl(path)}
    return [by_step[step] for step in sorted(by_step)]
