"""A pool of worker processes kept alive for each world size, for tests that need several ranks.

`run_ranks(4, fn, *args)` calls the module-level `fn(world, *args)` on four gloo ranks and returns their results. A
rank that raises fails the test with its traceback, and the pool is thrown away: gloo never tells the other ranks.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

GROUP_TIMEOUT_S = 120
POOL_TIMEOUT_S = 180
PRELOAD = ["torch", "torch.distributed", "transformers.modeling_rope_utils"]
_pools: dict[int, Pool] = {}


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of `fn(world, *args)` on every rank, in rank order."""
    if world_size not in _pools:
        _pools[world_size] = Pool(world_size)
    return _pools[world_size].run(fn, *args)


class Pool:
    """`size` processes in one gloo world, each running what it is sent."""

    def __init__(self, size: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.size = size
        self.folder = tempfile.mkdtemp(prefix="ranks")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self.folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((fn, args))
        results: dict[int, Any] = {}
        while len(results) < self.size:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in results]
            ready = wait(waiting, timeout=POOL_TIMEOUT_S)
            if not ready:
                self._fail(f"ranks {sorted(set(range(self.size)) - set(results))} gave no answer in {POOL_TIMEOUT_S} s")
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    self._fail(f"rank {rank} died (exit code {self.processes[rank].exitcode})")
                if not ok:
                    self._fail(f"rank {rank} of {self.size} raised:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.size)]

    def _fail(self, why: str) -> None:
        self.close()
        raise AssertionError(why)

    def close(self) -> None:
        _pools.pop(self.size, None)
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()


def _serve(rank: int, size: int, folder: str, pipe: Connection) -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"  # names mismatched shapes on every rank
    import torch
    import torch.distributed as dist

    from hybridflow.parallel.world import World

    torch.set_num_threads(1)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    if size > 1:
        dist.init_process_group("gloo", store=dist.FileStore(os.path.join(folder, "store"), size), rank=rank,
                                world_size=size, timeout=timeout)
    world = World(rank, size, rank, torch.device("cpu"), timeout)
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, fn(world, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


@atexit.register
def _close_all() -> None:
    for pool in list(_pools.values()):
        pool.close()
