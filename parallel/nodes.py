"""Which ranks share a node: what is near and what is far when bytes move."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Nodes:
    """Nodes of equally many consecutive ranks, as every launcher numbers them; the last one may have fewer.

    Attributes:
        ranks_per_node: None where all ranks are near each other.
    Example: `Nodes(8).of(17) == 2`, `Nodes().of(17) == 0`.
    """

    ranks_per_node: int | None = None

    def of(self, rank: int) -> int:
        """The node of a rank."""
        return 0 if self.ranks_per_node is None else rank // self.ranks_per_node


ONE_NODE = Nodes()  # all ranks are near each other
