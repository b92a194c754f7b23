"""Where the weights of generation are between a reshard and the end of a rollout: in memory of their own, or in that of
the training weights as far as these have them.

Owns that memory and how it is put into the generation stage. It never moves a weight between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn

from hybridflow.generation.shared_weights import lend, take_back
from hybridflow.models.decoder import DecoderStage
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.share import rest_shapes, shared_map, tiling


class WeightMode(Enum):
    """Which home generation weights have."""

    SHARED = "shared"
    PACKED = "packed"


class WeightHome(Protocol):
    """The memory that a reshard fills. The order is `take`, filling what it gave, `ready`, generation, `free`.

    A home is made of a stage whose parameters have their shapes, best without memory (on the meta device); it leaves
    the stage without weights, as `free` does.

    Attributes:
        shard_map: where in the storages of `take` the boxes of every rank lie.
        taken_bytes: of memory that `take` allocates.
        storages: all that the generator computes with, as `shard_map` names it; empty once they are freed, or where
            they are the generator's to lay out anew from `ready` on.
    """

    shard_map: ShardMap
    taken_bytes: int
    storages: dict[str, Tensor]

    def take(self, training: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The home's own storages to fill, by name; `training` are the train engine's, under `share.TRAINING`."""

    def ready(self) -> None:
        """Let the stage compute with what was filled in."""

    def free(self) -> None:
        """Give the memory back; the stage cannot compute any more."""


class PackedHome:
    """A whole copy of the generation shard, which the generator may lay out anew: the fastest to compute with."""

    def __init__(self, stage: DecoderStage, shard_map: ShardMap, dtype: torch.dtype, device: torch.device) -> None:
        self.shard_map = shard_map
        self._stage, self._dtype, self._device = stage, dtype, device
        self._shapes = {name: param.shape for name, param in stage.named_parameters()}
        self.taken_bytes = sum(shape.numel() for shape in self._shapes.values()) * dtype.itemsize
        self.storages: dict[str, Tensor] = {}
        _leave_empty(stage, dtype, device)

    def take(self, training: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for name, param in self._stage.named_parameters():
            param.data = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        self.storages = {name: param.data for name, param in self._stage.named_parameters()}
        return self.storages

    def ready(self) -> None:
        self.storages = {}  # memory in rows is not kept where the runner takes another

    def free(self) -> None:
        for param in self._stage.parameters():
            param.data = torch.empty(0, dtype=self._dtype, device=self._device)
        self.storages = {}


class SharedHome:
    """The training weights where they lie, and memory for the rest alone: the least memory that can do, none where both
    layouts agree. Training must not go on until the weights are freed.
    """

    def __init__(self, stage: DecoderStage, train: ShardMap, wanted: ShardMap, rank: int, device: torch.device) -> None:
        self.shard_map = shared_map(train, wanted)
        self._stage, self._device = stage, device
        self._dtype = next(stage.parameters()).dtype
        self._tiling, self._rest = tiling(train, wanted, rank), rest_shapes(train, wanted, rank)
        self.taken_bytes = sum(prod(shape) for shape in self._rest.values()) * self._dtype.itemsize
        self.storages: dict[str, Tensor] = {}
        _leave_empty(stage, self._dtype, device)

    def take(self, training: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rest = {name: torch.empty(shape, dtype=self._dtype, device=self._device) for name, shape in self._rest.items()}
        self.storages = {**training, **rest}
        return rest

    def ready(self) -> None:
        lend(self._stage, self._tiling, self.storages)

    def free(self) -> None:
        take_back(self._stage)
        self.storages = {}


def _leave_empty(stage: DecoderStage, dtype: torch.dtype, device: torch.device) -> None:
    """Put empty parameters on `device` in place of the stage's: one of the meta device can be given no memory."""
    assert not tuple(stage.buffers()), "a buffer made on the meta device would have no values"
    for module in stage.modules():
        for name, _ in tuple(module.named_parameters(recurse=False)):
            empty = torch.empty(0, dtype=dtype, device=device)
            module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
