"""Routes: who sends a cell to whom, so that nobody is a funnel and slow links carry each byte once.

Owns the choice among equal holders, for all cells with the same holders and demanders at once. Pure arithmetic on rank
numbers: each rank works out its own part of it, without looking at what the other ranks do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hybridflow.parallel.arithmetic import ceil_div
from hybridflow.parallel.nodes import Nodes


@dataclass(frozen=True)
class Edge:
    """One transfer of a cell: at hop 0 `source` holds it, later it got it at an earlier hop and passes it on."""

    source: int
    dest: int
    hop: int


@dataclass(frozen=True)
class Spread:
    """How `takers` get a cell from `givers`, both ascending: evenly, in an order that turns from cell to cell.

    Attributes:
        passing: takers may pass on. Where they outnumber the givers, each giver gives once, to one taker of its share,
            which gives to the others of that share at the next hop.
    Example: `Spread((0,), (4, 5, 6), passing=True).giver(1, turn=0) == (4, 1)`.
    """

    givers: Sequence[int]
    takers: Sequence[int]
    passing: bool = False

    def giver(self, taker: int, turn: int) -> tuple[int, int]:
        """Who gives to the taker of this index, and at which hop."""
        at, num_takers, num_givers = (taker + turn) % len(self.takers), len(self.takers), len(self.givers)
        if num_takers < num_givers:
            first, end = at * num_givers // num_takers, (at + 1) * num_givers // num_takers
            return self.givers[first + turn // num_takers % (end - first)], 0
        share = at * num_givers // num_takers
        first = self._first(share)
        if self.passing and at != first:
            return self._taker_at(first, turn), 1
        return self.givers[share], 0

    def given(self, giver: int, turn: int) -> list[int]:
        """The takers that the giver of this index gives to at hop 0."""
        num_takers, num_givers = len(self.takers), len(self.givers)
        if num_takers < num_givers:
            at = ((giver + 1) * num_takers - 1) // num_givers
            first, end = at * num_givers // num_takers, (at + 1) * num_givers // num_takers
            mine = first + turn // num_takers % (end - first) == giver
            return [self._taker_at(at, turn)] if mine else []
        first = self._first(giver)
        end = first + 1 if self.passing else self._first(giver + 1)
        return [self._taker_at(at, turn) for at in range(first, end)]

    def passed(self, taker: int, turn: int) -> list[int]:
        """The takers that the taker of this index passes the cell on to, at hop 1."""
        if not self.passing or len(self.takers) < len(self.givers):
            return []
        at = (taker + turn) % len(self.takers)
        share = at * len(self.givers) // len(self.takers)
        if at != self._first(share):
            return []
        return [self._taker_at(other, turn) for other in range(at + 1, self._first(share + 1))]

    def _first(self, share: int) -> int:
        return ceil_div(share * len(self.takers), len(self.givers))

    def _taker_at(self, at: int, turn: int) -> int:
        return self.takers[(at - turn) % len(self.takers)]


@dataclass(frozen=True)
class Routes:
    """The ways of cells that the ranks `holders` have and the ranks `demanders` lack (both ascending).

    A node that has holders serves its own demanders. Into every other node a cell goes once, to its entry, which passes
    it on to the others there.

    Attributes:
        idle: demanders have nothing else to send, and may pass on between nodes too.
    """

    holders: tuple[int, ...]
    demanders: tuple[int, ...]
    nodes: Nodes
    idle: bool

    def edges(self, rank: int, turn: int) -> Iterator[Edge]:
        """The transfers of the cell of this turn that `rank` takes part in."""
        if rank in self._taker_places:
            yield self._received(rank, turn)
        yield from self._sent(rank, turn)

    @property
    def is_even(self) -> bool:
        """Whether every cell alone loads all holders and demanders alike, so that nothing needs turns."""
        if self._far_nodes:
            return False
        return all(len(near.takers) % len(near.givers) == 0 and not near.passing for near in self._near.values())

    def _received(self, rank: int, turn: int) -> Edge:
        node = self.nodes.of(rank)
        if node in self._near:
            source, hop = self._near[node].giver(self._taker_places[rank], turn)
            return Edge(source, rank, hop)
        entry, source, hop = self._entry(node, turn)
        return Edge(source, rank, hop) if rank == entry else Edge(entry, rank, hop + 1)

    def _sent(self, rank: int, turn: int) -> Iterator[Edge]:
        node = self.nodes.of(rank)
        if rank in self._giver_places:
            if node in self._near:
                for dest in self._near[node].given(self._near_places[rank], turn):
                    yield Edge(rank, dest, 0)
            if self._far_nodes:
                for far in self._far.given(self._giver_places[rank], turn):
                    yield Edge(rank, self._entry(far, turn)[0], 0)
        elif node in self._near:
            for dest in self._near[node].passed(self._taker_places[rank], turn):
                yield Edge(rank, dest, 1)
        elif rank in self._taker_places and rank == self._entry(node, turn)[0]:
            for far in self._far.passed(self._far_nodes.index(node), turn):
                yield Edge(rank, self._entry(far, turn)[0], 1)
            hop = self._entry(node, turn)[2]
            for dest in self._takers[node]:
                if dest != rank:
                    yield Edge(rank, dest, hop + 1)

    def _entry(self, node: int, turn: int) -> tuple[int, int, int]:
        """The rank by which a cell enters a far node, where it comes from, and at which hop."""
        giver, hop = self._far.giver(self._far_nodes.index(node), turn)
        return self._entry_rank(node, turn), giver if hop == 0 else self._entry_rank(giver, turn), hop

    def _entry_rank(self, node: int, turn: int) -> int:
        ranks = self._takers[node]
        return ranks[turn // len(self._far_nodes) % len(ranks)]

    @cached_property
    def _givers(self) -> dict[int, tuple[int, ...]]:
        return _by_node(self.holders, self.nodes)

    @cached_property
    def _takers(self) -> dict[int, tuple[int, ...]]:
        return _by_node(self.demanders, self.nodes)

    @cached_property
    def _near(self) -> dict[int, Spread]:
        """By node with holders: how its own demanders are served."""
        return {node: Spread(givers, self._takers[node], self.idle and len(self._takers[node]) > len(givers))
                for node, givers in self._givers.items() if node in self._takers}

    @cached_property
    def _far_nodes(self) -> tuple[int, ...]:
        return tuple(node for node in self._takers if node not in self._givers)

    @cached_property
    def _far(self) -> Spread:
        """Between nodes: the givers are ranks, the takers nodes, whose entries stand for them."""
        return Spread(self.holders, self._far_nodes, self.idle and len(self._far_nodes) > len(self.holders))

    @cached_property
    def _giver_places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.holders)}

    @cached_property
    def _near_places(self) -> dict[int, int]:
        return {rank: place for ranks in self._givers.values() for place, rank in enumerate(ranks)}

    @cached_property
    def _taker_places(self) -> dict[int, int]:
        """Place of a demander among those of its node."""
        return {rank: place for ranks in self._takers.values() for place, rank in enumerate(ranks)}


def _by_node(ranks: Sequence[int], nodes: Nodes) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(nodes.of(rank), []).append(rank)
    return {node: tuple(members) for node, members in found.items()}
