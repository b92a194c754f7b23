"""The metrics of a step as one rank knows them, and how those of all ranks become one table.

Owns the exchange, one for a step. What a metric means is told in `observe.metric_names`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridflow.exchange import share_json
from hybridflow.parallel.world import World

Metrics = dict[str, float]


@dataclass
class Board:
    """Ranks may write different metrics. Example: `Board(summed={"reshard/received_bytes": 8.0})`.

    Attributes:
        said: true of the whole job; who writes the same ones writes the same numbers.
        summed: a rank's part of a sum over all ranks.
        largest: of which the largest of all ranks counts.
        trouble: a sentence on what went wrong, None if nothing did; after `shared` that of the first rank with one.
    """

    said: Metrics = field(default_factory=dict)
    summed: Metrics = field(default_factory=dict)
    largest: Metrics = field(default_factory=dict)
    trouble: str | None = None

    def shared(self, world: World) -> Metrics:
        """What all ranks have written, the same on each of them. Collective over the world."""
        total: Metrics = {}
        told = share_json(world, [self.said, self.summed, self.largest, self.trouble])
        self.trouble = next((trouble for *_, trouble in told if trouble is not None), None)
        for said, summed, largest, _ in told:
            total |= said
            for name, part in summed.items():
                total[name] = total.get(name, 0.0) + part
            for name, value in largest.items():
                total[name] = max(total.get(name, value), value)
        return total
