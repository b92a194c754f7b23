"""Runs rows on worker processes so that no row can hold up the others for longer than the limit.

One worker lives from call to call. While every worker is stuck in a slow row and rows wait, more are started; a row
past the limit is killed with its worker. So rows that spin spin side by side, and a call ends about one limit after its
last healthy row. Decides only who runs what and when; `process` does it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from hybridflow.rewards.process import WorkerProcess
from hybridflow.rewards.records import FaultKind, Outcome, RowFault
from hybridflow.rewards.worker import Target

MAX_WORKERS = 8
# A row that takes longer lets others start beside it.
PATIENCE_S = 0.3


class WorkerPool:
    """Workers for one function. `limit_s`: seconds a row may run. Not for several threads at once.

    Raises:
        ValueError: from any method, when the function cannot be loaded.
    """

    def __init__(self, target: Target, limit_s: float, max_workers: int = MAX_WORKERS) -> None:
        self._target = target
        self._limit_s = limit_s
        self._max_workers = max_workers
        self._workers: list[WorkerProcess] = []
        self._num_wanted = 1

    def start(self) -> None:
        """Start the first worker and wait until its function is loaded."""
        if not self._workers:
            self._add(1)
        while not all(worker.is_ready for worker in self._workers):
            self._take_replies({})
            self._kill_late({})

    def run(self, calls: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """The outcome of each call (its keywords), in order; raises nothing that the function raises."""
        outcomes: dict[int, Outcome] = {}
        waiting = deque(range(len(calls)))
        self._num_wanted = 1
        while len(outcomes) < len(calls):
            self._hand_out(waiting, calls)
            self._grow(len(waiting))
            self._take_replies(outcomes)
            self._kill_late(outcomes)
        self._shrink()
        return [outcomes[row] for row in range(len(calls))]

    def close(self) -> None:
        """Kill all workers; a later call starts afresh."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _hand_out(self, waiting: deque[int], calls: Sequence[Mapping[str, Any]]) -> None:
        for worker in [worker for worker in self._workers if worker.has_ended()]:
            self._drop(worker)
        for worker in self._workers:
            if waiting and worker.is_idle:
                row = waiting.popleft()
                worker.hand(row, calls[row])

    def _grow(self, num_waiting: int) -> None:
        """Make up for killed workers; want twice as many when rows wait and every worker is stuck."""
        stuck_since = time.monotonic() - PATIENCE_S
        if (
            num_waiting
            and self._workers
            and all(worker.row is not None and worker.since <= stuck_since for worker in self._workers)
        ):
            self._num_wanted = min(2 * self._num_wanted, self._max_workers)
        num_free = sum(worker.row is None for worker in self._workers)  # ready or loading
        self._add(min(num_waiting - num_free, self._num_wanted - len(self._workers)))

    def _add(self, number: int) -> None:
        self._workers += [WorkerProcess(self._target, self._limit_s) for _ in range(number)]

    def _take_replies(self, outcomes: dict[int, Outcome]) -> None:
        """Wait until a worker says something or has to be looked at, and put down what the rows gave."""
        by_connection = {worker.connection: worker for worker in self._workers}
        for connection in wait(list(by_connection), timeout=self._time_to_next_event()):
            worker = by_connection[connection]
            row = worker.row
            outcome = self._receive(worker)
            if outcome is not None and row is not None:
                outcomes[row] = outcome

    def _receive(self, worker: WorkerProcess) -> Outcome | None:
        try:
            outcome = worker.receive()
        except ValueError:
            self.close()
            raise
        if outcome is not None and not worker.is_ready:
            self._drop(worker)
        return outcome

    def _time_to_next_event(self) -> float:
        now = time.monotonic()
        stuck = [worker.since + PATIENCE_S for worker in self._workers if worker.row is not None]
        events = [worker.deadline for worker in self._workers] + [time_ for time_ in stuck if time_ > now]
        return max(0.0, min(events) - now)

    def _kill_late(self, outcomes: dict[int, Outcome]) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline <= now]:
            if worker.row is None:
                self.close()
                raise ValueError("reward function: its file did not finish importing in time")
            outcomes[worker.row] = RowFault(FaultKind.TIMED_OUT, f"still running after {self._limit_s:g} s")
            self._drop(worker)

    def _drop(self, worker: WorkerProcess) -> None:
        worker.kill()
        self._workers.remove(worker)

    def _shrink(self) -> None:
        """Back to one worker; a new one, if the last was killed, loads while the caller goes on."""
        self._workers.sort(key=lambda worker: not worker.is_ready)
        for worker in self._workers[1:]:
            worker.kill()
        del self._workers[1:]
        if not self._workers:
            self._add(1)
