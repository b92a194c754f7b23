"""Random weights that do not depend on the layout: each block of rows of each canonical tensor has its own generator.

Owns the initial distributions. It never reads the global random state.
"""

from __future__ import annotations

import hashlib
import math
from math import prod

import torch
from torch import Tensor

from hybridflow.models.config import ModelConfig
from hybridflow.models.weights import SCORE_HEAD, VALUE_HEAD
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.shard_map import ShardMap

BLOCK_NUMEL = 1 << 20  # rows are drawn in blocks of about this many numbers, which bounds the memory


@torch.no_grad()
def init_weights(storages: dict[str, Tensor], shard_map: ShardMap, rank: int, seed: int, config: ModelConfig) -> None:
    """Fill every storage of `rank` from `seed`; equal seeds give equal canonical tensors in every layout.

    Norms are 1, biases 0, matrices N(0, initializer_range); the two matrices that write into the residual stream are
    divided by sqrt(2 num_layers) (GPT-2), value and score heads are N(0, 1/(hidden+1)).
    """
    for shard in shard_map.shards(rank):
        init_shard(storages, shard, shard_map.shapes[shard.box.name], seed, _std(shard.box.name, config))


@torch.no_grad()
def init_shard(storages: dict[str, Tensor], shard: Shard, shape: tuple[int, ...], seed: int, std: float) -> None:
    """Fill one shard of a canonical tensor of full `shape`: N(0, std) for a matrix; norms 1, biases 0."""
    name, view = shard.box.name, shard.view(storages)
    if len(shape) == 1:
        view.fill_(0.0 if name.endswith(".bias") else 1.0)
        return
    step = max(1, BLOCK_NUMEL // prod(shape[1:]))
    for start in range(shard.box.lo[0] // step * step, shard.box.hi[0], step):
        block = Box(name, (start, *(0 for _ in shape[1:])), (min(start + step, shape[0]), *shape[1:]))
        part = block.intersect(shard.box)
        local = tuple(slice(lo - base, hi - base) for lo, hi, base in zip(part.lo, part.hi, block.lo))
        shard.view(storages, part).copy_(_normal(block, seed)[local] * std)


def head_std(hidden_size: int) -> float:
    """Standard deviation of a fresh value or score head: its outputs start well below 1."""
    return 1.0 / (hidden_size + 1)


def _std(name: str, config: ModelConfig) -> float:
    if name in (VALUE_HEAD, SCORE_HEAD):
        return head_std(config.hidden_size)
    if name.endswith((".o_proj.weight", ".down_proj.weight")):
        return config.initializer_range / math.sqrt(2 * config.num_layers)
    return config.initializer_range


def _normal(block: Box, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{block.name}/{block.lo[0]}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(block.shape, generator=generator)
