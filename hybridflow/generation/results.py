"""What the steps of a generation have sampled, kept as it comes and sorted by request once at the end.

Owns the record. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sampled:
    """Tokens of one request, in order: int64 ids, float64 log-probs `[tokens]` each. `processed` is None where drawn
    from the raw distribution."""

    ids: np.ndarray
    log_probs: np.ndarray
    processed: np.ndarray | None


class Results:
    """Steps go in, requests come out. The cost of a step is a few list entries, whatever its rows."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._steps: list[tuple[np.ndarray, ...]] = []

    def add(self, requests: np.ndarray, ids: np.ndarray, log_probs: np.ndarray, processed: np.ndarray | None) -> None:
        """One token each of `requests` `[samples]`, none of them twice. The arrays are kept."""
        columns = (requests, ids, log_probs)
        self._steps.append(columns if processed is None else (*columns, processed))

    def by_request(self) -> Iterator[Sampled]:
        """Of every request, those without a token included."""
        if not self._num_requests:
            return
        nothing = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0)
        columns = [np.concatenate(column) for column in zip(*self._steps, strict=True)] if self._steps else nothing
        order = columns[0].argsort(kind="stable")  # within a request the steps stay in order
        ends = np.bincount(columns[0], minlength=self._num_requests).cumsum()
        parts = [np.split(column[order], ends[:-1]) for column in columns[1:]]
        for row in zip(*parts, strict=True):
            yield Sampled(row[0], row[1], row[2] if len(row) == 3 else None)
