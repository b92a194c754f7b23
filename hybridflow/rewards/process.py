"""One worker process as its owner sees it: start it without waiting, hand it a row, read its answer, kill it.

Not `multiprocessing`: its spawn runs the user's main module again, and its fork copies a process that has threads and
devices. A fresh interpreter and a socket need neither, and work from any thread.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hybridflow
from hybridflow.rewards.records import FaultKind, Outcome, RowFault, Score
from hybridflow.rewards.worker import Target

# Long enough for a file that imports a deep-learning library on a busy machine.
START_LIMIT_S = 120.0


class WorkerProcess:
    """Starts at once; `is_ready` once its function is loaded. `row` is the row that it runs, None between rows."""

    def __init__(self, target: Target, limit_s: float) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hybridflow.rewards.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=_environment(),
                start_new_session=True,  # a key press is not its business, and its own children die with it
            )  # fmt: skip
        self.connection = Connection(ours.detach())
        self.connection.send((target, limit_s))
        self.is_ready = False
        self.row: int | None = None
        self.since = time.monotonic()  # of the start, then of the row
        self._limit_s = limit_s

    @property
    def deadline(self) -> float:
        """When this worker has to be killed (time.monotonic): infinite while it waits for a row."""
        if not self.is_ready:
            return self.since + START_LIMIT_S
        return float("inf") if self.row is None else self.since + self._limit_s

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.row is None

    def has_ended(self) -> bool:
        """Whether it died while it had nothing to do; then no row is to blame."""
        return self.is_idle and self.connection.poll()  # an idle worker says nothing: this is the end of the stream

    def hand(self, row: int, arguments: Mapping[str, Any]) -> None:
        """Start a row. A worker that has died in the meantime shows at the next `receive`."""
        assert self.is_idle
        self.row, self.since = row, time.monotonic()
        try:
            self.connection.send(arguments)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the closed socket is read as the end of the process

    def receive(self) -> Outcome | None:
        """What the readable connection holds: the outcome of the row, or None when the worker has become ready.

        Raises:
            ValueError: the function cannot be loaded, or the process died before it was.
        """
        try:
            reply = json.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return self._ended()
        if "load_error" in reply:
            raise ValueError(f"reward function: {reply['load_error']}")
        if "ready" in reply:
            self.is_ready = True
            return None
        self.row = None
        if "fault" in reply:
            return RowFault(FaultKind(reply["fault"]), reply["message"])
        return Score(reply["score"], reply["extras"])

    def _ended(self) -> Outcome:
        status = self._process.wait()
        if not self.is_ready:
            raise ValueError(f"reward function: its process ended with status {status} while loading")
        self.is_ready = False
        return RowFault(FaultKind.CRASHED, f"the process of the reward function ended with status {status}")

    def kill(self) -> None:
        """End the process and everything it started; safe to call twice."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self.connection.close()


def _environment() -> dict[str, str]:
    """This environment, with the package that is running here importable there."""
    root = str(Path(hybridflow.__file__).parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, inherited] if inherited else [root])}
