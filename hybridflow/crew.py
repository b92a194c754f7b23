"""The ranks that work on a batch together: what they add up and tell each other.

All of the world, or those of its ranks that learn while others generate. It owns a group and no role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hybridflow.exchange import share_json
from hybridflow.parallel.collectives import all_reduce
from hybridflow.parallel.mesh import AxisGroup, everyone
from hybridflow.parallel.world import World


@dataclass(frozen=True)
class Crew:
    """Example: `Crew.whole(world).sum(torch.ones(1))` is the world's size."""

    world: World
    group: AxisGroup

    @classmethod
    def whole(cls, world: World) -> Crew:
        """All ranks."""
        return cls(world, everyone(world))

    @classmethod
    def of(cls, world: World, ranks: Sequence[int]) -> Crew | None:
        """`ranks`, ascending; None on the others. Collective over the world."""
        if len(ranks) == world.size:
            return cls.whole(world)
        group = world.group(tuple(ranks), "crew")
        return cls(world, AxisGroup(tuple(ranks), ranks.index(world.rank), group)) if world.rank in ranks else None

    @property
    def rank(self) -> int:
        """Mine, in the world."""
        return self.world.rank

    @property
    def size(self) -> int:
        return self.group.size

    def sum(self, x: Tensor) -> Tensor:
        """Over all of the crew, in place. Collective."""
        return all_reduce(x, self.group)

    def share(self, value: Any) -> list[Any]:
        """What each of the crew has, which JSON knows, in the order of ranks. Collective."""
        return share_json(self.world, value, self.group)
