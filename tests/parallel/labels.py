"""Storages that hold, in place of weights, the canonical index of each element and the number of its tensor: whatever
lies in a wrong place shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.parallel.box import Box, Shard


def storages_of(shards: Sequence[Shard]) -> dict[str, Tensor]:
    """Flat storages that the shards fit in, filled with -1."""
    sizes: dict[str, int] = defaultdict(int)
    for shard in shards:
        last = shard.offset + sum((n - 1) * stride for n, stride in zip(shard.box.shape, shard.strides, strict=True))
        sizes[shard.storage] = max(sizes[shard.storage], last + 1)
    return {name: torch.full((size,), -1, dtype=torch.int64) for name, size in sizes.items()}


def labels(box: Box, shapes: dict[str, tuple[int, ...]]) -> Tensor:
    """What the elements of `box` hold."""
    shape = shapes[box.name]
    number = list(shapes).index(box.name)
    return torch.arange(torch.Size(shape).numel()).view(shape)[box.slices] + (number << 32)


def fill(storages: dict[str, Tensor], shards: Sequence[Shard], shapes: dict[str, tuple[int, ...]]) -> None:
    for shard in shards:
        shard.view(storages).copy_(labels(shard.box, shapes))
