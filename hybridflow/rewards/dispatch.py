"""The thread that turns a pool, so that nobody who hands in work waits for it until he asks for what it gave.

Owns the thread and the two tables between it and its callers. It sleeps while nothing happens.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from socket import socketpair

from hybridflow.rewards.pool import Outcomes, WorkerPool
from hybridflow.rewards.process import Call
from hybridflow.rewards.records import Outcome


class Dispatcher:
    """Work for `pool`, submitted by any thread and collected by one. Its own thread starts with the first call and ends
    with `close`.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._changed = threading.Condition()
        self._new: deque[Call] = deque()
        self._given: Outcomes = {}
        self._missing: set[Hashable] = set()  # what `collect` waits for; one caller at a time
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closing = self._resting = False
        self._alarm, self._bell = socketpair()
        self._bell.setblocking(False)

    def submit(self, call: Call) -> None:
        """Have `call` done. Returns at once."""
        with self._changed:
            rings = not self._new  # else the thread has been told, and will find this call beside the others
            self._new.append(call)
            if self._thread is None and self._error is None:
                self._closing = False
                self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
                self._thread.start()
        if rings:
            self._ring()

    def collect(self, tickets: Sequence[Hashable]) -> list[list[Outcome]]:
        """Wait for the outcomes of these calls, in order; they are forgotten here.

        Raises:
            ValueError: a worker that was killed cannot load the function again; until `close`.
        """
        with self._changed:
            self._missing = {ticket for ticket in tickets if ticket not in self._given}
            self._changed.wait_for(lambda: self._error is not None or not self._missing)
            if self._error is not None:
                raise self._error
            outcomes = [self._given.pop(ticket) for ticket in tickets]
            self._resting = True
        self._ring()
        return outcomes

    def close(self) -> None:
        """End the workers and the thread. A later `submit` starts new ones."""
        with self._changed:
            thread, self._closing = self._thread, True
        self._ring()
        if thread is None:
            self._pool.close()
        else:
            thread.join()
        with self._changed:
            self._error = None
            self._new.clear()

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # then it rings already
            self._bell.send(b"!")

    def _run(self) -> None:
        error = None
        try:
            while self._take_in():
                given = self._pool.turn((self._alarm,))
                if given:
                    self._give(given)
        except BaseException as raised:  # whoever collects is told
            error = raised
        finally:
            self._pool.close()
            with self._changed:
                self._error, self._thread, self._given = error, None, {}
                self._new.clear()
                self._changed.notify_all()

    def _give(self, given: Outcomes) -> None:
        """Whoever collects is woken once, when all of his calls are done."""
        with self._changed:
            self._given |= given
            if self._missing:
                self._missing -= given.keys()
                if not self._missing:
                    self._changed.notify_all()

    def _take_in(self) -> bool:
        """Take what callers have handed in since; False if they want no more."""
        self._alarm.setblocking(False)
        with suppress(BlockingIOError):
            self._alarm.recv(4096)
        with self._changed:
            while self._new:
                self._pool.put(self._new.popleft())
            resting, self._resting = self._resting, False
            if self._closing:
                return False
        if resting and self._pool.is_done:
            self._pool.rest()
        return True
