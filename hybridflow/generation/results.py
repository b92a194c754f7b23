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
    """Steps go in, requests come out. Columns in memory that doubles: objects of each step, kept to the end, would wake
    Python's garbage collector all along.
    """

    def __init__(self, num_requests: int) -> None:
        self._num_requests, self._size = num_requests, 0
        self._ids = np.empty((2, 256), dtype=np.int64)  # requests, tokens
        self._numbers = np.empty((2, 256))  # raw and processed log-probs
        self._has_processed = False

    def add(self, requests: np.ndarray, ids: np.ndarray, log_probs: np.ndarray, processed: np.ndarray | None) -> None:
        """One token each of `requests` `[samples]`, none of them twice. Either all steps have `processed` or none."""
        first, self._size = self._size, self._size + len(requests)
        while self._size > self._ids.shape[1]:
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)], axis=1)
            self._numbers = np.concatenate([self._numbers, np.empty_like(self._numbers)], axis=1)
        self._ids[0, first : self._size] = requests
        self._ids[1, first : self._size] = ids
        self._numbers[0, first : self._size] = log_probs
        if processed is not None:
            self._has_processed = True
            self._numbers[1, first : self._size] = processed

    def by_request(self) -> Iterator[Sampled]:
        """Of every request, those without a token included."""
        if not self._num_requests:
            return
        requests, ids = self._ids[:, : self._size]
        order = requests.argsort(kind="stable")  # within a request the steps stay in order
        ends = np.bincount(requests, minlength=self._num_requests).cumsum()[:-1]
        columns = ids, *self._numbers[: 2 if self._has_processed else 1, : self._size]
        for row in zip(*(np.split(column[order], ends) for column in columns), strict=True):
            yield Sampled(row[0], row[1], row[2] if self._has_processed else None)
