"""Some gloo ranks on this host, kept alive for several calls: what the checks and benchmarks of this package run on.

Owns the processes and their rendezvous. Any fault ends all of them: gloo never tells the other ranks.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import FileStore

PRELOAD = ("torch", "torch.distributed", "hybridflow.parallel.world")
DEFAULT_TIMEOUT_S = 120.0
START_S = 300.0  # imports take their time where cores are shared
CONNECT_S = 60.0  # what ranks that have arrived need at most to join hands
GRACE_S = 10.0  # what a call has beyond the time-out of its groups, for ranks to say which operation it was
STACK_S = 5.0  # what a silent rank has to write where it is


class RankError(RuntimeError):
    """A rank raised, died or gave no answer in time. The message names it and holds its traceback, or its stack."""


class LocalRanks:
    """`size` processes with one thread each, in one gloo world. Use as a context manager.

    Args:
        preload: modules that the processes have imported before they are forked.
        timeout_s: how long a collective may wait, and a whole call may take before nobody has answered. A collective
            that fails in this time says so itself; of ranks that are silent `GRACE_S` later, their stacks tell.
    Example: `with LocalRanks(4) as ranks: ranks.run(fn, 1, 2)` is the list of `fn(world, 1, 2)` of ranks 0 to 3.
    """

    def __init__(self, size: int, preload: tuple[str, ...] = (), timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.size, self.timeout_s = size, timeout_s
        self._context = mp.get_context("forkserver")  # a fork of this process would inherit its threads' locks
        self._context.set_forkserver_preload([*PRELOAD, *preload])
        self._pipes: list[Connection] = []
        self._processes: list[mp.process.BaseProcess] = []
        self._folder = ""

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Results of `fn(world, *args)` on every rank, in rank order; `fn` is a function of a module.

        Raises:
            RankError: a rank failed. All processes are gone then; the next call starts new ones.
        """
        if not self._processes:
            self._start()
            self._answers(START_S)  # each says that it has joined the others
        for pipe in self._pipes:
            pipe.send((fn, args))
        return self._answers(self.timeout_s + GRACE_S)

    def close(self) -> None:
        """End every process."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="hybridflow-ranks-")
        for rank in range(self.size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, self.size, self._folder, self.timeout_s, theirs),
                                            daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _answers(self, timeout_s: float) -> list[Any]:
        """One answer of every rank, each at most `timeout_s` after the one before."""
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), timeout=timeout_s)
            if not ready:
                silent = sorted(waiting.values())
                self._fail(f"ranks {silent} of {self.size} gave no answer in {timeout_s:.0f} s"
                           f"{''.join(map(self._where, silent))}")
            for rank in (waiting[pipe] for pipe in ready):
                answers[rank] = self._answer(rank)
        return [answers[rank] for rank in range(self.size)]

    def _answer(self, rank: int) -> Any:
        try:
            succeeded, value = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join()
            self._fail(f"rank {rank} of {self.size} died (exit code {self._processes[rank].exitcode})")
        if not succeeded:
            self._fail(f"rank {rank} of {self.size} raised:\n{value}")
        return value

    def _where(self, rank: int) -> str:
        """The stack of a rank that is stuck, wherever that is; "" where it cannot be had."""
        path, process = Path(self._folder, f"stack{rank}"), self._processes[rank]
        if not path.exists() or process.pid is None:  # it has not come so far that it could be asked
            return ""
        os.kill(process.pid, signal.SIGUSR1)
        until = time.monotonic() + STACK_S
        while time.monotonic() < until and not path.stat().st_size:
            time.sleep(0.05)
        time.sleep(0.05)  # the rest of the lines
        stack = path.read_text()
        return f"\nrank {rank} was at:\n{stack}" if stack else ""

    def _fail(self, why: str) -> None:
        self.close()
        raise RankError(why)


def _serve(rank: int, size: int, folder: str, timeout_s: float, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from hybridflow.parallel.world import World

    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    stack = open(os.path.join(folder, f"stack{rank}"), "w")
    # In C, so that it works inside a collective too; the main thread is the one that runs the call.
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    if size > 1:
        store = dist.FileStore(os.path.join(folder, "store"), size)
        _arrive(store, rank, size)
        # A group keeps the time-out that it was made with; a collective's must end before the call's.
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size,
                                timeout=max(timeout, timedelta(seconds=CONNECT_S)))
    world = World(rank, size, rank, torch.device("cpu"), timeout)
    pipe.send((True, None))
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            os._exit(0)  # the interpreter's own way out waits for gloo's threads
        try:
            pipe.send((True, fn(world, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _arrive(store: FileStore, rank: int, size: int) -> None:
    """Wait until every rank has done its imports, which may take far longer than a collective."""
    store.set(f"arrived{rank}", "")
    store.wait([f"arrived{other}" for other in range(size)], timedelta(seconds=START_S))
