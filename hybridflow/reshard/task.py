"""One move of weights between two layouts: which rank takes which coordinate, and the maps and the plan that follow.

Pure metadata. It reads no file, checks nothing that a person wrote, and moves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel.assign import assign
from hybridflow.parallel.mesh import Grid, Layout
from hybridflow.parallel.nodes import ONE_NODE, Nodes
from hybridflow.parallel.plan import TransferPlan
from hybridflow.parallel.schedules.chunks import ChunkOrder, Chunks
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.transfer import DEFAULT_BUCKET_BYTES


@dataclass(frozen=True)
class Side:
    """One of the two layouts, and whose it is. Example: `Side(Layout(tp=2, dp=2), ranks=(0, 1, 2, 3))`.

    Attributes:
        ranks: `layout.size` of the world's ranks.
        layers_per_chunk: None for an even cut.
    """

    layout: Layout
    ranks: tuple[int, ...]
    vpp: int = 1
    layers_per_chunk: Sequence[int] | None = None
    order: ChunkOrder = ChunkOrder.LOOP

    @property
    def chunks(self) -> Chunks:
        return Chunks(self.layout.pp, self.vpp, self.order)

    def shard_map(self, model: ModelConfig, grid: Grid) -> ShardMap:
        """Where the decoder's weights lie on a grid of this layout."""
        return decoder_shard_map(model, grid, Head.LANGUAGE_MODEL, self.chunks, self.layers_per_chunk)

    def __str__(self) -> str:
        order = " in V order" if self.order is ChunkOrder.V else ""
        return f"{self.layout}" + (f" vpp{self.vpp}{order}" if self.vpp > 1 else "")


@dataclass(frozen=True)
class Task:
    """Weights of `model` in the layout of `train`, wanted in that of `generate`. The layouts suit model and ranks.

    Attributes:
        within_node: whether a tensor group of generation stays in a node, if one fits there.
        bucket_bytes: bounds what is in flight on a rank.
    """

    model: ModelConfig
    train: Side
    generate: Side
    world_size: int
    nodes: Nodes = ONE_NODE
    within_node: bool = True
    dtype: torch.dtype = torch.bfloat16
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    @cached_property
    def train_grid(self) -> Grid:
        return Grid(self.train.layout, self.train.ranks)

    @cached_property
    def src(self) -> ShardMap:
        return self.train.shard_map(self.model, self.train_grid)

    @property
    def colocated(self) -> bool:
        """Whether the same ranks train and generate."""
        return set(self.train.ranks) == set(self.generate.ranks)

    @property
    def keeps_groups_in_nodes(self) -> bool:
        """Whether tensor groups of generation are kept in nodes: they should be, and they fit."""
        sizes = Counter(self.nodes.of(rank) for rank in self.generate.ranks).values()
        return self.within_node and all(size % self.generate.layout.tp == 0 for size in sizes)

    @cached_property
    def generate_grid(self) -> Grid:
        """The assignment with the fewest bytes; in the order of the ranks where other ranks generate than train."""
        if not self.colocated:
            return Grid(self.generate.layout, self.generate.ranks)
        return assign(self.src, self.train_grid, self.generate.layout, self._map_of, nodes=self.nodes,
                      tp_within_node=self.keeps_groups_in_nodes)

    @cached_property
    def dst(self) -> ShardMap:
        return self._map_of(self.generate_grid)

    @cached_property
    def plan(self) -> TransferPlan:
        return TransferPlan(self.src, self.dst, self.nodes)

    def travelling_bytes(self, rank: int) -> int:
        """What a rank sends and receives in all: no more than this is ever in flight there."""
        return self.dtype.itemsize * (self.plan.received_numel(rank) + self.plan.sent_numel(rank))

    @property
    def model_bytes(self) -> int:
        return self.dtype.itemsize * sum(map(prod, self.src.shapes.values()))

    def _map_of(self, grid: Grid) -> ShardMap:
        return self.generate.shard_map(self.model, grid)
