"""Which virtual stage (chunk) of a model lies on which pipeline stage.

Pure arithmetic. Chunks are numbered through the whole model: chunk 0 has the embedding, the last one the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ChunkOrder(Enum):
    """How consecutive chunks are dealt out to the stages."""

    LOOP = "loop"  # round and round: chunk c on stage c mod pp (interleaving, arXiv 2104.04473 section 2.2)
    V = "v"  # down and up again, two chunks a stage: 0 1 2 3 3 2 1 0 (ZB-V, arXiv 2405.15362 section 3)


@dataclass(frozen=True)
class Chunks:
    """`vpp` chunks on each of `pp` stages. Example: `Chunks(2, 2).of_stage(0) == (0, 2)`; in V order `(0, 3)`.

    Raises:
        ValueError: a degree below 1, or V order with vpp other than 2.
    """

    pp: int = 1
    vpp: int = 1
    order: ChunkOrder = ChunkOrder.LOOP

    def __post_init__(self) -> None:
        if min(self.pp, self.vpp) < 1:
            raise ValueError(f"pp {self.pp} and vpp {self.vpp} must be at least 1")
        if self.order is ChunkOrder.V and self.vpp != 2:
            raise ValueError(f"vpp {self.vpp} must be 2 where chunks go down the stages and up again")

    @property
    def count(self) -> int:
        return self.pp * self.vpp

    @property
    def last(self) -> int:
        """The chunk with the head."""
        return self.count - 1

    def stage_of(self, chunk: int) -> int:
        assert 0 <= chunk < self.count, (chunk, self)
        if self.order is ChunkOrder.V and chunk >= self.pp:
            return self.count - 1 - chunk
        return chunk % self.pp

    def of_stage(self, stage: int) -> tuple[int, ...]:
        """The chunks of a stage, in the order of the model."""
        return tuple(chunk for chunk in range(self.count) if self.stage_of(chunk) == stage)

    @property
    def head_stage(self) -> int:
        """The stage that has the last chunk: the last stage, in V order the first."""
        return self.stage_of(self.last)
