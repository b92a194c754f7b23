"""The parent of the process in which a reward runs: sees to it that nothing outlives its owner's wish.

Owns the life and death of the runner and of all that it starts. On Linux whatever loses its parent below the keeper,
also by a double fork or in a session of its own, becomes the keeper's child (prctl(2), PR_SET_CHILD_SUBREAPER), so that
one loop over children ends everything. Elsewhere it ends the runner's process group. It holds no user code and sleeps
until something happens.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TIDY = b"t"
SEEN = b" "  # white space, which may stand before the last words
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LINUX = sys.platform == "linux"
VMSTAT = Path("/proc/vmstat")


class Keeper:
    """Keeps one runner, which is made by `fork`, for the owner at the other end of `leash`.

    The owner closes its end to end everything, and sends TIDY once the function has been loaded, which SEEN answers,
    and after a call. The keeper sends one line of JSON when the runner has ended or is about to be: {"status": as
    `subprocess` has it, "out_of_memory": whether the kernel ended it, "tidied": whether the keeper did, because of what
    calls had left}.
    """

    def __init__(self, leash: socket.socket) -> None:
        self.leash = leash
        self.runner = 0
        self._ended, self._ends = socket.socketpair()
        self._ends.setblocking(False)
        self._known: frozenset[int] | None = None
        self._oom_kills = oom_kills()

    def fork(self) -> bool:
        """Make the runner. True in it, where the keeper is of no use any more."""
        adopt_orphans()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._ends.fileno(), warn_on_full_buffer=False)
        self.runner = os.fork()
        if self.runner:
            return False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self.leash, self._ended, self._ends):
            end.close()
        os.setsid()  # what it sends to its group does not reach the keeper
        die_with_parent()
        offer_to_the_kernel()
        return True

    def keep(self) -> None:
        """Return when the owner wants no more of the runner, or the runner has ended, and nothing is left."""
        while True:
            readable, _, _ = select.select([self.leash, self._ended], [], [])
            if self._ended in readable:
                self._ended.recv(4096)
                if self._reaped_runner():
                    break
            if self.leash in readable:
                asked = self._heard()
                if not asked:
                    break
                is_first = self._known is None
                if self._has_leftovers():
                    self._tell(0, tidied=True)
                    break
                if is_first:
                    self._say(SEEN)
        self._end_all()

    def _heard(self) -> bytes:
        try:
            return self.leash.recv(4096)
        except ConnectionResetError:
            return b""

    def _reaped_runner(self) -> bool:
        """Reap whatever has ended; tell the owner if the runner has."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid == self.runner:
                    self._tell(os.waitstatus_to_exitcode(status))
                    return True
        return False

    def _tell(self, status: int, *, tidied: bool = False) -> None:
        out_of_memory = status == -signal.SIGKILL and oom_kills() > self._oom_kills
        told = {"status": status, "out_of_memory": out_of_memory, "tidied": tidied}
        self._say(json.dumps(told).encode() + b"\n")

    def _say(self, words: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self.leash.sendall(words)

    def _has_leftovers(self) -> bool:
        """Whether processes are left of the calls since the last time. Those there are at the first time are part of
        the function, unless they have lost their parent.
        """
        self._oom_kills = oom_kills()
        orphans = [pid for pid in children(os.getpid()) if pid != self.runner]
        below = frozenset(descendants(self.runner))
        known, self._known = self._known, below if self._known is None else self._known
        return bool(orphans) or (known is not None and not below <= known)

    def _end_all(self) -> None:
        """Kill children until there are none; those of the killed become children in their turn."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.runner, signal.SIGKILL)  # all at once, so that a group that forks on is outrun
        with suppress(ChildProcessError):
            while True:
                for pid in children(os.getpid()):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)


def children(pid: int) -> list[int]:
    """The children of a process, whichever of its threads made them; none where the system does not say."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, thread.read_text().split())
    return found


def descendants(pid: int) -> Iterator[int]:
    """The children of a process, theirs, and so on."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def oom_kills() -> int:
    """Processes that this system's kernel has ended for want of memory so far; 0 where it does not count."""
    if not VMSTAT.is_file():
        return 0
    counts = dict(line.split() for line in VMSTAT.read_text().splitlines())
    return int(counts.get("oom_kill", 0))


def adopt_orphans() -> None:
    """From now on, processes below this one that lose their parent become its children (Linux)."""
    if LINUX:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """The kernel ends this process when its parent ends (Linux)."""
    if LINUX:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def offer_to_the_kernel() -> None:
    """Where memory runs out, this process is ended before the rank (Linux)."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
