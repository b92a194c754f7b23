"""Routes: who sends what to whom, so that nobody is a funnel and slow links carry each byte once.

Owns the choice among equal holders, for everything that the same ranks hold and the same ranks lack. Pure arithmetic on
rank numbers: each rank works out its own part, without looking at what the others do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd, lcm

from hybridflow.parallel.arithmetic import ceil_div
from hybridflow.parallel.nodes import Nodes


@dataclass(frozen=True)
class Edge:
    """One transfer: at hop 0 `source` holds what it sends, later it got it at the hop before and passes it on."""

    source: int
    dest: int
    hop: int


@dataclass(frozen=True)
class Turn:
    """One of `count` equal stretches of what travels; roles change from turn to turn, so that all ranks do as much."""

    index: int
    count: int


@dataclass(frozen=True)
class Deal:
    """How parties of takers get what the givers have, each giver giving equally much.

    What the parties want, laid end to end, is a line that the givers divide evenly: what lies a fraction x into the
    want of party k comes from giver floor((k + x) * givers / parties). Of each party one rank, its lead, receives and
    passes on to its mates. With `passing` a giver gives to one of its block of parties, which passes on to the others.

    Attributes:
        givers: ascending, at least one.
        parties: disjoint; none holds a giver.
    Example: `Deal((0,), ((4,), (5,), (6,)), passing=True)`: in turn 1 of 3 rank 0 gives to 5, which gives to 4 and 6.
    """

    givers: tuple[int, ...]
    parties: tuple[tuple[int, ...], ...]
    passing: bool

    @cached_property
    def num_turns(self) -> int:
        """The fewest turns in which all roles go round."""
        num_givers, num_parties = len(self.givers), len(self.parties)
        firsts = ceil_div(num_parties, num_givers) if self.passing else 1
        return num_givers // gcd(num_givers, num_parties) * firsts * self._num_leads

    def received(self, rank: int, turn: Turn) -> Edge:
        """How a taker gets what travels in a turn."""
        party = self._party_of[rank]
        lead, giver = self._lead(party, turn), self._giver(party, turn)
        first = self._first(self._block(giver, turn), turn) if self.passing else party
        if rank != lead:
            return Edge(lead, rank, 1 + (party != first))
        return Edge(self.givers[giver], rank, 0) if party == first else Edge(self._lead(first, turn), rank, 1)

    def sent(self, rank: int, turn: Turn) -> Iterator[Edge]:
        """What a giver gives and a taker passes on in a turn; nothing for ranks that are neither."""
        if rank in self._place_of:
            block = self._block(self._place_of[rank], turn)
            for party in (self._first(block, turn),) if self.passing and block else block:
                yield Edge(rank, self._lead(party, turn), 0)
        elif rank in self._party_of and rank == self._lead(self._party_of[rank], turn):
            yield from self._passed(rank, self._party_of[rank], turn)

    def _passed(self, rank: int, party: int, turn: Turn) -> Iterator[Edge]:
        """What the lead of a party passes on: to the other parties of its block, and to its mates."""
        block = self._block(self._giver(party, turn), turn) if self.passing else range(party, party + 1)
        first = self._first(block, turn)
        if party == first:
            yield from (Edge(rank, self._lead(other, turn), 1) for other in block if other != party)
        yield from (Edge(rank, mate, 1 + (party != first)) for mate in self.parties[party] if mate != rank)

    def _giver(self, party: int, turn: Turn) -> int:
        return (party * turn.count + turn.index) * len(self.givers) // (len(self.parties) * turn.count)

    def _block(self, giver: int, turn: Turn) -> range:
        """The parties with this giver: the inverse of `_giver`."""
        scale, shift = len(self.parties) * turn.count, turn.index * len(self.givers)
        start, stop = (ceil_div(at * scale - shift, len(self.givers) * turn.count) for at in (giver, giver + 1))
        return range(start, stop)

    def _first(self, block: range, turn: Turn) -> int:
        return block[turn.index // self._num_leads % len(block)]

    def _lead(self, party: int, turn: Turn) -> int:
        return self.parties[party][turn.index % len(self.parties[party])]

    @cached_property
    def _num_leads(self) -> int:
        return max(map(len, self.parties))

    @cached_property
    def _place_of(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.givers)}

    @cached_property
    def _party_of(self) -> dict[int, int]:
        return {rank: place for place, party in enumerate(self.parties) for rank in party}


class Routes:
    """The ways of what the ranks `holders` have and the ranks `demanders` lack.

    A node with holders serves its own demanders, each for itself. Every other node is one party: what it lacks enters
    it once.
    """

    def __init__(self, holders: Iterable[int], demanders: Iterable[int], nodes: Nodes, *, passing: bool) -> None:
        """`passing`: demanders have nothing else to send, and may pass on where no slow link asks for it too."""
        givers, takers = _by_node(holders, nodes), _by_node(demanders, nodes)
        self._nodes = nodes
        self._near = {node: Deal(ranks, tuple((taker,) for taker in takers[node]), passing)
                      for node, ranks in givers.items() if node in takers}
        away = tuple(ranks for node, ranks in takers.items() if node not in givers)
        self._far = [Deal(tuple(sorted(holders)), away, passing)] if away else []
        self.num_turns = lcm(*(deal.num_turns for deal in (*self._near.values(), *self._far)))
        self._demanders = frozenset(demanders)

    def edges(self, rank: int, turn: Turn) -> Iterator[Edge]:
        """The transfers of a turn that `rank` takes part in."""
        near = self._near.get(self._nodes.of(rank))
        deals = [near, *self._far] if near else self._far
        if rank in self._demanders:
            yield deals[0].received(rank, turn)
        for deal in deals:
            yield from deal.sent(rank, turn)


def _by_node(ranks: Iterable[int], nodes: Nodes) -> dict[int, tuple[int, ...]]:
    """The ranks of each node, all ascending."""
    found: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault(nodes.of(rank), []).append(rank)
    return {node: tuple(members) for node, members in found.items()}
