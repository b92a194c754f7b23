"""What the rivals of `bench reshard` share: the model, the two layouts, and weights whose every bit can be checked.

Owns no way of moving weights. Whatever a rival's layout is, it says where its result lies by a ShardMap, so that all of
them are filled and checked alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from hybridflow.models.config import Family, Head, ModelConfig
from hybridflow.models.weights import canonical_shapes, decoder_shard_map
from hybridflow.parallel.box import Shard
from hybridflow.parallel.mesh import Grid, Layout
from hybridflow.parallel.nodes import ONE_NODE, Nodes
from hybridflow.parallel.shard_map import ShardMap

DTYPE = torch.bfloat16
MODEL = ModelConfig(Family.LLAMA, vocab_size=32000, hidden_size=768, intermediate_size=2304, num_layers=12,
                    num_heads=12, num_kv_heads=4, head_dim=64)  # 131.7 million parameters
Storages = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Weights trained in one layout and wanted in another, on all ranks of a world.

    Example: `Case(Layout(tp=4), Layout(tp=2, dp=2))`.
    """

    train: Layout
    generate: Layout
    model: ModelConfig = MODEL
    nodes: Nodes = ONE_NODE

    def __str__(self) -> str:
        return f"{_short(self.train)} -> {_short(self.generate)}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the canonical tensors."""
        return canonical_shapes(self.model, Head.LANGUAGE_MODEL)

    @property
    def model_bytes(self) -> int:
        return DTYPE.itemsize * sum(map(prod, self.shapes.values()))

    @property
    def train_map(self) -> ShardMap:
        return self.map_of(Grid.of(self.train))

    def map_of(self, grid: Grid) -> ShardMap:
        """Of our decoder, on a grid of either layout."""
        return decoder_shard_map(self.model, grid, Head.LANGUAGE_MODEL)


@dataclass(frozen=True)
class Rival:
    """A way from the training to the generation layout, on one rank.

    Attributes:
        run: moves all weights once. Collective.
        shard_map: where they lie then.
        result: the storages of that map; a run may put others in their place.
        own: tensors that it holds beside the training weights, from one run to the next.
        received_bytes: that a run brings to this rank from others.
    """

    run: Callable[[], object]
    shard_map: ShardMap
    result: Storages
    own: Sequence[Tensor]
    received_bytes: int

    @property
    def own_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.own)


def canonical_weights(shapes: dict[str, tuple[int, ...]]) -> Storages:
    """For each canonical tensor random bits, the same on every rank."""
    weights = {}
    for name, shape in shapes.items():
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        bits = torch.randint(-2**15, 2**15, shape, dtype=torch.int16, generator=draw)
        weights[name] = bits.view(DTYPE)
    return weights


def empty_storages(shards: Sequence[Shard]) -> Storages:
    """A tensor for each storage that consists of whole rows of shards: `[rows, *trailing]`, filled with NaN."""
    rows: dict[str, int] = {}
    trailing: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        rows[shard.storage] = rows.get(shard.storage, 0) + shard.box.shape[0]
        trailing[shard.storage] = shard.box.shape[1:]
    return {name: torch.full((count, *trailing[name]), torch.nan, dtype=DTYPE) for name, count in rows.items()}


def filled(shards: Sequence[Shard], weights: Storages) -> Storages:
    """The storages of one rank with its part of the weights in them."""
    storages = empty_storages(shards)
    for shard in shards:
        shard.view(storages).copy_(weights[shard.box.name][shard.box.slices])
    return storages


def first_wrong(shards: Sequence[Shard], storages: Storages, weights: Storages) -> str | None:
    """Name and region of a shard that differs from the weights in some bit; None where all are right."""
    for shard in shards:
        wanted = weights[shard.box.name][shard.box.slices]
        if not torch.equal(shard.view(storages).view(torch.int16), wanted.view(torch.int16)):
            return f"{shard.box.name} {shard.box.lo} to {shard.box.hi}"
    return None


def plain(of: ShardMap) -> ShardMap:
    """The same boxes, each in a storage of its own under its canonical name."""
    def shards_of(rank: int) -> list[Shard]:
        return [Shard.of_rows(shard.box, shard.box.name) for shard in of.shards(rank)]
    return replace(of, shards_of=shards_of, _kept={})


def _short(layout: Layout) -> str:
    return " ".join(f"{axis}{size}" for axis, size in (("tp", layout.tp), ("pp", layout.pp), ("dp", layout.dp))
                    if size > 1)
