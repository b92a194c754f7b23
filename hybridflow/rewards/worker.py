"""The process in which a reward function runs: `python -m hybridflow.rewards.worker CALLS LEASH`, started by `process`.

It becomes two: a keeper, which ends everything when the owner lets go of the socket LEASH, and a runner, which loads
one function and answers one call after another on the socket CALLS. Standard library only, so that it starts in a
fraction of a second; the function's file may import what it likes. The function runs on the main thread, where it may
use signals.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from hybridflow.rewards.judging import judge
from hybridflow.rewards.keeper import Keeper
from hybridflow.rewards.limits import Limits
from hybridflow.rewards.loading import LoadError, load_function

MIB = 1 << 20
# Exit code of a runner whose function has closed the socket to its owner.
LOST = 91


class Line:
    """The runner's socket to its owner, which a function may have closed, or may hold in a copy of the process."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # programs that a function starts do not hold it
        self.connection = Connection(descriptor)
        self._socket, self._process = os.fstat(descriptor).st_ino, os.getpid()

    def send(self, reply: object) -> None:
        """Send as JSON. A process that a function has forked and that comes back here ends."""
        if os.getpid() != self._process:
            os._exit(0)
        if not self._is_whole():
            os._exit(LOST)
        self.connection.send_bytes(json.dumps(reply).encode())

    def _is_whole(self) -> bool:
        try:
            return os.fstat(self.connection.fileno()).st_ino == self._socket
        except OSError:
            return False


def serve(descriptor: int) -> None:
    """Answer calls: (Target, Limits) first, then a list of the rows' keywords for each call."""
    line = Line(descriptor)
    target, limits = line.connection.recv()
    try:
        loaded = load_function(target)
    except LoadError as error:
        line.send({"load_error": str(error)})
        return
    if limits.memory_mb is not None:
        bound_memory(limits)
    line.send({"ready": True, "batched": loaded.batched})
    while True:
        try:
            rows = line.connection.recv()
        except EOFError:
            return
        judged = judge(loaded, rows)
        with suppress(OSError, ValueError):  # of an output that the function has closed
            sys.stdout.flush()
        line.send(judged)


def bound_memory(limits: Limits) -> None:
    """Let this process, and each that it forks, take so much more for data (RLIMIT_DATA: heap, stacks of threads and
    private writable maps, as Linux has counted since 4.7).

    The address space would be the wrong thing to bound: imports of numerical libraries and of device drivers reserve
    gigabytes of it that they never touch.
    """
    assert limits.memory_mb is not None
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _data_bytes() + limits.memory_mb * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _data_bytes() -> int:
    """What counts so far; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), 0)


def main(calls: int, leash: int) -> None:
    """Become keeper and runner; each returns when its work is done."""
    keeper = Keeper(socket.socket(fileno=leash))
    if keeper.fork():
        serve(calls)
        return
    os.close(calls)
    keeper.keep()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
