"""What every rank knows of an engine, also of one that only other ranks have: the model, its grid, who holds what.

Pure metadata. `native` builds the engine on the ranks of the grid; `Elsewhere` stands for it on the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hybridflow.engine.options import EngineOptions
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.layout import split_heads
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel.mesh import Grid, Outside
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.shard_map import ShardMap


@dataclass(frozen=True)
class Blueprint:
    """A model under one head on a grid. Example: `Blueprint(model, grid, Head.VALUE, options).has_head(rank)`."""

    model: ModelConfig
    grid: Grid
    head: Head
    options: EngineOptions

    @cached_property
    def chunks(self) -> Chunks:
        return Chunks(self.grid.layout.pp) if self.options.chunks is None else self.options.chunks

    @cached_property
    def shard_map(self) -> ShardMap:
        """Where the weights of all its ranks are."""
        return decoder_shard_map(self.model, self.grid, self.head, self.chunks, self.options.layers_per_chunk)

    @property
    def token_multiple(self) -> int:
        """What the tokens of a micro-batch on one context rank must be a multiple of."""
        return self.grid.layout.tp if self.options.sequence_parallel else 1

    @property
    def shares_prompts(self) -> bool:
        """Whether a prompt that several rows of a micro-batch have is computed once for all of them."""
        return self.options.share_prompts and self.grid.layout.cp == 1 and not self.options.batch_invariant

    def has_head(self, rank: int) -> bool:
        """Whether that rank's stage has the last chunk."""
        return self.grid.coord(rank).pp == self.chunks.head_stage

    @property
    def speaker(self) -> int:
        """The rank that tells the others what all of the engine's ranks know."""
        return self.grid.ranks[0]


class Elsewhere:
    """An engine on ranks that this one is not among. Making one is collective with those who make the engine.

    Attributes:
        num_updates: as the engine counts them.
    """

    def __init__(self, blueprint: Blueprint, outside: Outside) -> None:
        self.blueprint, self.world = blueprint, outside.world
        self.num_updates = 0
        # What the stage makes on the ranks that have it (`grad_syncs`).
        outside.make_tp_blocks(split_heads(blueprint.model, blueprint.grid.layout.tp, 0).kv_replicas)
