"""Gloo ranks of this host, kept alive for each world size, for tests that need several.

`run_ranks(4, fn, *args)` calls the module-level `fn(world, *args)` on four of them and returns their results. A rank
that raises fails the test with its traceback, and the next test gets new ones. Whatever the collected tests had
imported when the first ranks were asked for, ranks have from the start: importing it takes each of them seconds.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any

from hybridflow.local_ranks import LocalRanks

TIMEOUT_S = 170.0
# What some of our modules import at first use.
LATE = {
    "hybridflow.bench.megatron_reshard": ("megatron.core.resharding",),
    "hybridflow.bench.megatron_schedule": ("megatron.core.pipeline_parallel.schedules",
                                           "megatron.core.transformer.multi_token_prediction"),
    "hybridflow.bench.pipeline": ("torch.distributed.pipelining",),
    "hybridflow.bench.reshard": ("torch.distributed.checkpoint",),
    "hybridflow.kernels.attention": ("torch.nn.attention.bias",),
    "hybridflow.data.reasoning": ("reasoning_gym",),
    "hybridflow.models.config": ("transformers.modeling_rope_utils",),
}
_pools: dict[int, LocalRanks] = {}


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of `fn(world, *args)` on every rank, in rank order."""
    return kept_ranks(world_size).run(fn, *args)


def kept_ranks(world_size: int) -> LocalRanks:
    """Those that `run_ranks` runs on."""
    if world_size not in _pools:
        _pools[world_size] = LocalRanks(world_size, _imported(), TIMEOUT_S)
    return _pools[world_size]


def _imported() -> tuple[str, ...]:
    """Our modules, and helpers of the tests, that this process has imported, with what those import late."""
    ours = [name for name in sys.modules if name.startswith(("hybridflow.", "tests.")) and ".test_" not in name]
    return (*ours, *(late for name in ours for late in LATE.get(name, ())))


@atexit.register
def _close_all() -> None:
    for pool in _pools.values():
        pool.close()
