"""Runs calls on worker processes so that none can hold up the others for longer than the limit.

One worker lives on while there is nothing to do. While every worker is stuck in a slow call and others wait, more are
started; a call past the limit is killed with its worker. So rows that spin spin side by side, and work ends about one
limit after its last healthy row. Decides only who runs what and when; `process` does it, and `dispatch` has the thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterable
from multiprocessing.connection import wait
from socket import socket

from hybridflow.rewards.limits import Limits
from hybridflow.rewards.loading import Target
from hybridflow.rewards.process import Call, WorkerProcess
from hybridflow.rewards.records import FaultKind, Outcome

MAX_WORKERS = 8
# A call that takes longer lets others start beside it.
PATIENCE_S = 0.3
Outcomes = dict[Hashable, list[Outcome]]


class WorkerPool:
    """Workers for one function. Not for several threads at once.

    Raises:
        ValueError: from any method, when the function cannot be loaded.
    """

    def __init__(self, target: Target, limits: Limits, num_workers: int | None = None) -> None:
        """`num_workers` are kept at all times; None keeps one, and lets them grow to MAX_WORKERS for slow calls."""
        self._target, self._limits = target, limits
        self._num_kept, self._most = num_workers or 1, num_workers or MAX_WORKERS
        self._workers: list[WorkerProcess] = []
        self._waiting: deque[Call] = deque()
        self._num_wanted = self._num_kept

    def start(self) -> bool:
        """Start the workers that are kept, and wait until the function is loaded; whether it takes lists."""
        self._add(self._num_kept - len(self._workers))
        while not all(worker.is_ready for worker in self._workers):
            self._take_replies(())
            self._kill_late()
        return self._workers[0].batched

    def put(self, call: Call) -> None:
        """Have a call done by some later `turn`."""
        self._waiting.append(call)

    @property
    def is_done(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._waiting and all(worker.call is None for worker in self._workers)

    def turn(self, wakers: Iterable[socket] = ()) -> Outcomes:
        """Hand out what waits, sleep until something happens (in a worker or one of `wakers`), and answer it."""
        self._hand_out()
        self._grow()
        return self._take_replies(wakers) | self._kill_late()

    def rest(self) -> None:
        """Back to the workers that are kept, without what their calls have left running. New ones for those that were
        killed load while the caller goes on.
        """
        self._workers.sort(key=lambda worker: not worker.is_ready)
        for worker in self._workers[self._num_kept:]:
            worker.kill()
        del self._workers[self._num_kept:]
        self._num_wanted = self._num_kept
        for worker in self._workers:
            if worker.is_idle:
                worker.tidy()
        self._add(self._num_kept - len(self._workers))

    def close(self) -> None:
        """Kill all workers and forget what waits; a later call starts afresh."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
        self._waiting.clear()
        self._num_wanted = self._num_kept

    def _hand_out(self) -> None:
        for worker in [worker for worker in self._workers if worker.has_ended()]:
            self._drop(worker)
        for worker in self._workers:
            if self._waiting and worker.is_idle:
                worker.hand(self._waiting.popleft())

    def _grow(self) -> None:
        """Make up for killed workers; want twice as many when calls wait and every worker is stuck."""
        stuck_since = time.monotonic() - PATIENCE_S
        if (self._waiting and self._workers
                and all(worker.call is not None and worker.since <= stuck_since for worker in self._workers)):
            self._num_wanted = min(2 * self._num_wanted, self._most)
        num_free = sum(worker.call is None for worker in self._workers)  # ready or loading
        self._add(min(len(self._waiting) - num_free, self._num_wanted - len(self._workers)))

    def _add(self, number: int) -> None:
        self._workers += [WorkerProcess(self._target, self._limits) for _ in range(number)]

    def _take_replies(self, wakers: Iterable[socket]) -> Outcomes:
        """Wait until somebody says something or has to be looked at, and give what calls have given."""
        by_connection = {worker.connection: worker for worker in self._workers}
        outcomes: Outcomes = {}
        for end in wait([*by_connection, *wakers], timeout=self._time_to_next_event()):
            if (worker := by_connection.get(end)) is not None:
                call, given = worker.call, self._receive(worker)
                if given is not None and call is not None:
                    outcomes[call.ticket] = given
        return outcomes

    def _receive(self, worker: WorkerProcess) -> list[Outcome] | None:
        was_ready = worker.is_ready
        try:
            outcomes = worker.receive()
        except ValueError:
            self.close()
            raise
        if was_ready and not worker.is_ready:
            self._drop(worker)
            if outcomes is None and worker.call is not None:  # what earlier calls had left was being ended beside it
                self._waiting.appendleft(worker.call)
            elif outcomes is None and worker.num_calls:
                self._add(min(1, self._num_kept - len(self._workers)))
        return outcomes

    def _time_to_next_event(self) -> float | None:
        """Seconds until a worker is late, or stuck; None while all are idle."""
        now = time.monotonic()
        stuck = [worker.since + PATIENCE_S for worker in self._workers if worker.call is not None]
        events = [worker.deadline for worker in self._workers] + [moment for moment in stuck if moment > now]
        first = min(events, default=float("inf"))
        return None if first == float("inf") else max(0.0, first - now)

    def _kill_late(self) -> Outcomes:
        now, outcomes = time.monotonic(), Outcomes()
        for worker in [worker for worker in self._workers if worker.deadline <= now]:
            if worker.call is None:
                self.close()
                raise ValueError("the function's file did not finish importing in time")
            late = f"still running after {self._limits.timeout_s:g} s"
            outcomes[worker.call.ticket] = worker.call.failed(FaultKind.TIMED_OUT, late)
            self._drop(worker)
        return outcomes

    def _drop(self, worker: WorkerProcess) -> None:
        worker.kill()
        self._workers.remove(worker)
