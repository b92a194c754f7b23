"""One worker as its owner sees it: start it without waiting, hand it a call, read its answer, end it.

Not `multiprocessing`: its spawn runs the user's main module again, and its fork copies a process that has threads and
devices. A fresh interpreter and two sockets need neither, and work from any thread.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hybridflow
from hybridflow.rewards.keeper import SEEN, TIDY
from hybridflow.rewards.limits import Limits
from hybridflow.rewards.loading import Target
from hybridflow.rewards.records import FaultKind, Outcome, RowFault, Score
from hybridflow.rewards.worker import LOST

# Long enough for a file that imports a deep-learning library on a busy machine.
START_LIMIT_S = 120.0
# A worker that has just spoken is not asked again whether it lives.
JUST_NOW_S = 0.05
# How long a keeper may take to end what it keeps before it is ended itself.
END_LIMIT_S = 10.0


@dataclass(frozen=True)
class Call:
    """What a worker does at once. Example: `Call(("step 3", 7), 1, payload)`.

    Attributes:
        ticket: by which its outcomes are known.
        num_rows: how many outcomes it has.
        payload: the pickled list of the rows' keywords.
    """

    ticket: Hashable
    num_rows: int
    payload: bytes

    def failed(self, kind: FaultKind, message: str) -> list[Outcome]:
        """The same fault in every row."""
        return [RowFault(kind, message)] * self.num_rows


class WorkerProcess:
    """Starts at once; `is_ready` once its function is loaded. `call` is what it is doing, None between calls.

    Attributes:
        batched: whether its function takes lists; known when it is ready.
        num_calls: how many it has been given.
    """

    def __init__(self, target: Target, limits: Limits) -> None:
        (ours, theirs), (self._leash, keepers) = socket.socketpair(), socket.socketpair()
        with theirs, keepers:
            descriptors = [theirs.fileno(), keepers.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hybridflow.rewards.worker", *map(str, descriptors)],
                pass_fds=descriptors, stdin=subprocess.DEVNULL, env=_environment(),
                start_new_session=True,  # a key press is not its business
            )  # fmt: skip
        self.connection = Connection(ours.detach())
        self.connection.send((target, limits))
        self.is_ready = self.batched = False
        self.call: Call | None = None
        self.num_calls = 0
        self.since = self.heard = time.monotonic()  # of the start, then of the call; of the last reply
        self._limit_s = limits.timeout_s

    @property
    def deadline(self) -> float:
        """When this worker has to be killed (time.monotonic): infinite while it waits for a call."""
        if not self.is_ready:
            return self.since + START_LIMIT_S
        return float("inf") if self.call is None else self.since + self._limit_s

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.call is None

    def has_ended(self) -> bool:
        """Whether it died while it had nothing to do; then no row is to blame."""
        if not self.is_idle or time.monotonic() - self.heard < JUST_NOW_S:
            return False
        return self.connection.poll()  # an idle worker says nothing: this is the end of the stream

    def hand(self, call: Call) -> None:
        """Start a call. A worker that has died in the meantime shows at the next `receive`."""
        assert self.is_idle
        self.call, self.since, self.num_calls = call, time.monotonic(), self.num_calls + 1
        with suppress(BrokenPipeError, ConnectionResetError):  # the closed socket is read as the end of the process
            self.connection.send_bytes(call.payload)

    def receive(self) -> list[Outcome] | None:
        """What the readable connection holds: the outcomes of the call, or None when the worker has become ready, or
        has ended through no fault of the call that it may have (it is not ready then).

        Raises:
            ValueError: the function cannot be loaded, or the process died before it was.
        """
        try:
            reply = json.loads(self.connection.recv_bytes())
        except (OSError, EOFError):
            return self._ended()
        except ValueError:  # not JSON: the function has written where it should not
            self.is_ready = False
            return self.call.failed(FaultKind.CRASHED, "it wrote to the socket of its worker") if self.call else None
        self.heard = time.monotonic()
        if isinstance(reply, list):
            self.call = None
            return [_outcome(row) for row in reply]
        if "load_error" in reply:
            raise ValueError(reply["load_error"])
        self.is_ready, self.batched = True, reply["batched"]
        self.tidy()  # what it has started so far is part of the function
        self._wait_until_seen()
        return None

    def _wait_until_seen(self) -> None:
        """Until the keeper has looked: what a call starts sooner would be taken for a part of the function too."""
        self._leash.settimeout(END_LIMIT_S)
        with suppress(OSError):
            if self._leash.recv(1, socket.MSG_PEEK) == SEEN:  # else they are last words, which stay to be read
                self._leash.recv(1)

    def tidy(self) -> None:
        """Let the worker end if processes are left of its calls."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._leash.sendall(TIDY)

    def _ended(self) -> list[Outcome] | None:
        words = self._last_words()
        status = words["status"]
        if not self.is_ready:
            raise ValueError(f"the function's process ended with status {status} while loading")
        self.is_ready = False
        if self.call is None or words["tidied"]:
            return None
        if words["out_of_memory"]:
            return self.call.failed(FaultKind.OUT_OF_MEMORY, "the kernel ended its process for want of memory")
        if status == LOST:
            return self.call.failed(FaultKind.CRASHED, "the function has closed the socket of its worker")
        return self.call.failed(FaultKind.CRASHED, f"the process of the reward function ended with status {status}")

    def _last_words(self) -> dict[str, Any]:
        """What the keeper says of the runner's end; its own end where it says nothing."""
        self._leash.settimeout(END_LIMIT_S)
        said = b""
        with suppress(OSError):
            while not said.endswith(b"\n") and (more := self._leash.recv(4096)):
                said += more
        if not said.strip():
            self.kill()
            return {"status": self._process.wait(), "out_of_memory": False, "tidied": False}
        return json.loads(said)

    def kill(self) -> None:
        """End the process and everything it started; safe to call twice."""
        self._leash.close()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:  # something has stopped the keeper
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.connection.close()


def _outcome(row: dict[str, Any]) -> Outcome:
    if "fault" in row:
        return RowFault(FaultKind(row["fault"]), row["message"])
    return Score(row["score"], row["extras"])


def _environment() -> dict[str, str]:
    """This environment, with the package that is running here importable there."""
    root = str(Path(hybridflow.__file__).parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, inherited] if inherited else [root])}
