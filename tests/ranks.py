"""Gloo ranks of this host, kept alive for each world size, for tests that need several.

`run_ranks(4, fn, *args)` calls the module-level `fn(world, *args)` on four of them and returns their results. A rank
that raises fails the test with its traceback, and the next test gets new ones.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

from hybridflow.local_ranks import LocalRanks

TIMEOUT_S = 170.0
PRELOAD = ("transformers.modeling_rope_utils",)
_pools: dict[int, LocalRanks] = {}


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of `fn(world, *args)` on every rank, in rank order."""
    if world_size not in _pools:
        _pools[world_size] = LocalRanks(world_size, PRELOAD, TIMEOUT_S)
    return _pools[world_size].run(fn, *args)


@atexit.register
def _close_all() -> None:
    for pool in _pools.values():
        pool.close()
