"""What a move of weights costs, in bytes: of each rank, of each link, and by the formulas of HybridFlow's Table 2.

Pure counting. In a large world only some ranks are planned; of the others, what they receive follows from their kinds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

from hybridflow.parallel.plan import lower_bound_numel
from hybridflow.parallel.share import REST, shared_map
from hybridflow.reshard.task import Task

ALL_PLANNED = 64  # ranks up to which each one's part is planned
SAMPLED = 8


@dataclass(frozen=True)
class RankVolume:
    """What a move costs one rank.

    Attributes:
        received_bytes: counted in its plan; where it is not planned, what plans bring to its kind: the lower bound.
        sent_bytes: None where it is not planned.
        train_bytes: of its training shard.
        generate_bytes: of its generation shard.
        rest_bytes: of the generation shard, what needs memory of its own where training weights are used in place.
        in_flight_bytes: an upper bound of what staging buffers take: the bucket, or all that the rank sends and
            receives if that is less; where it is not planned, all that anybody receives. What is sent from its place
            and received into it takes less.
    """

    rank: int
    received_bytes: int
    lower_bound_bytes: int
    sent_bytes: int | None
    train_bytes: int
    generate_bytes: int
    rest_bytes: int
    in_flight_bytes: int

    @property
    def planned(self) -> bool:
        return self.sent_bytes is not None

    @property
    def shared_bytes(self) -> int:
        """Of parameters while it generates, where training weights are used in place."""
        return self.train_bytes + self.rest_bytes

    @property
    def packed_bytes(self) -> int:
        """Of parameters while it generates from a copy of its own."""
        return self.train_bytes + self.generate_bytes


@dataclass(frozen=True)
class Formula:
    """A row of HybridFlow's Table 2 (arXiv 2409.19256): bytes of one rank. None where it does not apply."""

    name: str
    received_bytes: float | None
    parameter_bytes: float | None


@dataclass(frozen=True)
class Volumes:
    """The whole move. Example: `Volumes.of(task).received_bytes == Volumes.of(task).lower_bound_bytes`.

    Attributes:
        ranks: every rank that trains or generates, ascending.
        links: (source, destination) -> bytes, of all that planned ranks receive.
        node_links: the same between nodes; both ends are one node for bytes that stay in it.
        formulas: of DS-Chat, HybridFlow-V and HybridFlow.
    """

    model_bytes: int
    ranks: tuple[RankVolume, ...]
    links: dict[tuple[int, int], int]
    node_links: dict[tuple[int, int], int]
    formulas: tuple[Formula, ...]

    @classmethod
    def of(cls, task: Task) -> Volumes:
        """Count `task`, planning every rank of a small world and a few of a large one."""
        every = task.plan.ranks
        planned = set(every if len(every) <= ALL_PLANNED else sampled(every, SAMPLED))
        ranks = _Counter(task, planned).ranks(every)
        links = _links(task, planned)
        nodes: Counter[tuple[int, int]] = Counter()
        for (source, dest), size in links.items():
            nodes[task.nodes.of(source), task.nodes.of(dest)] += size
        return cls(task.model_bytes, ranks, links, dict(sorted(nodes.items())), formulas(task))

    @property
    def received_bytes(self) -> int:
        return sum(rank.received_bytes for rank in self.ranks)

    @property
    def lower_bound_bytes(self) -> int:
        return sum(rank.lower_bound_bytes for rank in self.ranks)

    @property
    def all_planned(self) -> bool:
        return all(rank.planned for rank in self.ranks)

    @property
    def peak_extra_bytes(self) -> int:
        """An upper bound of one rank's memory beyond its training shard, where that is used in place."""
        return max(rank.rest_bytes + rank.in_flight_bytes for rank in self.ranks)

    @property
    def peak_extra_bytes_packed(self) -> int:
        """The same where generation has a copy of its own."""
        return max(rank.generate_bytes + rank.in_flight_bytes for rank in self.ranks)


class _Counter:
    """Counts ranks, each pair of a source and a destination kind once."""

    def __init__(self, task: Task, planned: set[int]) -> None:
        self._task, self._planned = task, planned
        self._shared = shared_map(task.src, task.dst)
        self._kept: dict[tuple[Hashable, Hashable], tuple[int, int, int, int]] = {}

    def ranks(self, ranks: tuple[int, ...]) -> tuple[RankVolume, ...]:
        return tuple(map(self._rank, ranks))

    def _rank(self, rank: int) -> RankVolume:
        task, size = self._task, self._task.dtype.itemsize
        bound, train, generate, rest = (size * numel for numel in self._of_kinds(rank))
        if rank not in self._planned:  # what it sends, others receive
            return RankVolume(rank, bound, bound, None, train, generate, rest, min(task.bucket_bytes, self._everyones))
        received, sent = size * task.plan.received_numel(rank), size * task.plan.sent_numel(rank)
        in_flight = min(task.bucket_bytes, task.travelling_bytes(rank))
        return RankVolume(rank, received, bound, sent, train, generate, rest, in_flight)

    @cached_property
    def _everyones(self) -> int:
        """Bytes that all ranks receive, and so a bound of what one sends and receives."""
        return self._task.dtype.itemsize * sum(self._of_kinds(rank)[0] for rank in self._task.plan.ranks)

    def _of_kinds(self, rank: int) -> tuple[int, int, int, int]:
        """`_sizes`, counted once for ranks of the same kinds."""
        kinds = (self._task.src.kind_by_rank.get(rank), self._task.dst.kind_by_rank.get(rank))
        if kinds not in self._kept:
            self._kept[kinds] = self._sizes(rank)
        return self._kept[kinds]

    def _sizes(self, rank: int) -> tuple[int, int, int, int]:
        """Elements: lower bound, training shard, generation shard, its rest."""
        task = self._task
        return (lower_bound_numel(task.src, task.dst, rank),
                sum(shard.box.numel for shard in task.src.shards(rank)),
                sum(shard.box.numel for shard in task.dst.shards(rank)),
                sum(shard.box.numel for shard in self._shared.shards(rank) if shard.storage.startswith(REST)))


def _links(task: Task, planned: set[int]) -> dict[tuple[int, int], int]:
    links: Counter[tuple[int, int]] = Counter()
    for rank in planned:
        for copy in task.plan.of_rank(rank):
            if copy.dest == rank != copy.source:
                links[copy.source, rank] += copy.box.numel * task.dtype.itemsize
    return dict(sorted(links.items()))


def sampled(ranks: tuple[int, ...], count: int) -> tuple[int, ...]:
    """`count` of the ranks, evenly, the first and the last among them. Example: `sampled((0, 1, 2, 3), 2) == (0, 3)`.
    """
    return tuple(ranks[place * (len(ranks) - 1) // (count - 1)] for place in range(count))


def formulas(task: Task) -> tuple[Formula, ...]:
    """Table 2 of HybridFlow, of one rank that trains and generates; d are all that hold the same training weights.

    They are for the same ranks in both layouts; HybridFlow's own also needs a generation replica that is not larger
    than a training replica.
    """
    train, generate, size = task.train.layout, task.generate.layout, task.model_bytes
    cut, cut_generate, data = train.tp * train.pp, generate.tp * generate.pp, train.dp * train.cp
    applies, groups = task.colocated, task.colocated and cut % cut_generate == 0
    return (Formula("DS-Chat", size * (cut * data - 1) / (cut * data) if applies else None, size if applies else None),
            Formula("HybridFlow-V", size * (cut - 1) / cut if applies else None, size if applies else None),
            Formula("HybridFlow", size * (cut - cut_generate) / (cut_generate * cut) if groups else None,
                    size / cut_generate if groups else None))
