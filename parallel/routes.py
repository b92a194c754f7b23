"""Routes: who sends what to whom, so that nobody is a funnel and slow links carry each byte once.

Owns the choice among equal holders, for everything that the same ranks hold and the same ranks lack. Pure arithmetic on
rank numbers: each rank works out its own part, without looking at what the others do.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from copy import copy
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


class Parties:
    """Disjoint tuples of ranks, in order.

    Leaving some of them out takes time for these only, not for all. That counts: each of thousands of holders of
    different things serves all the others.

    Attributes:
        largest: ranks of the largest party, 0 without any.
    Example: `Parties([(4,), (5, 6), (7,)]).without([0])` are the two parties (5, 6) and (7,).
    """

    def __init__(self, every: Sequence[tuple[int, ...]]) -> None:
        self._every = every
        self._place_of = {rank: place for place, party in enumerate(every) for rank in party}
        self._sizes = Counter(map(len, every))
        self.largest = max(self._sizes, default=0)
        self._without: list[int] = []
        self._before: list[int] = []  # how many parties come before each that is left out

    def without(self, places: Collection[int]) -> Parties:
        """All parties but those at these places."""
        left = copy(self)
        left._without = sorted({*self._without, *map(self._every_place, places)})
        left._before = [place - skipped for skipped, place in enumerate(left._without)]
        gone = Counter(len(self._every[place]) for place in left._without)
        left.largest = max((size for size, count in self._sizes.items() if count > gone[size]), default=0)
        return left

    def find(self, rank: int) -> int | None:
        """The place of the party of a rank; None for a rank in none."""
        place = self._place_of.get(rank)
        if place is None:
            return None
        skipped = bisect_left(self._without, place)
        return None if place in self._without[skipped : skipped + 1] else place - skipped

    def __len__(self) -> int:
        return len(self._every) - len(self._without)

    def __getitem__(self, place: int) -> tuple[int, ...]:
        return self._every[self._every_place(place)]

    def _every_place(self, place: int) -> int:
        return place + bisect_right(self._before, place)


@dataclass(frozen=True)
class Deal:
    """How parties of takers get what the givers have, each giver giving equally much.

    What the parties want, laid end to end, is a line that the givers divide evenly: what lies a fraction x into the
    want of party k comes from giver floor((k + x) * givers / parties). Of each party one rank, its lead, receives and
    passes on to its mates. With `passing` a giver gives to one of its block of parties, which passes on to the others.

    Attributes:
        givers: ascending, at least one.
        parties: at least one; none holds a giver.
    Example: `Deal((0,), Parties([(4,), (5,), (6,)]), passing=True)`: in turn 1 of 3 rank 0 gives to 5, which gives to
    4 and 6.
    """

    givers: tuple[int, ...]
    parties: Parties
    passing: bool

    @cached_property
    def num_turns(self) -> int:
        """The fewest turns in which all roles go round."""
        num_givers, num_parties = len(self.givers), len(self.parties)
        firsts = ceil_div(num_parties, num_givers) if self.passing else 1
        return num_givers // gcd(num_givers, num_parties) * firsts * self.parties.largest

    def received(self, rank: int, turn: Turn) -> Edge:
        """How a taker gets what travels in a turn."""
        party = self.parties.find(rank)
        assert party is not None, (rank, self)
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
            return
        party = self.parties.find(rank)
        if party is not None and rank == self._lead(party, turn):
            yield from self._passed(rank, party, turn)

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
        return block[turn.index // self.parties.largest % len(block)]

    def _lead(self, party: int, turn: Turn) -> int:
        ranks = self.parties[party]
        return ranks[turn.index % len(ranks)]

    @cached_property
    def _place_of(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.givers)}


class Wanting:
    """Ranks that want something. They are looked at once, whoever holds it.

    Attributes:
        parties: the ranks of each node are one.
        place_of: the place of each node's party.
    """

    def __init__(self, ranks: Iterable[int], nodes: Nodes) -> None:
        by_node = _by_node(ranks, nodes)
        self.parties = Parties(list(by_node.values()))
        self.place_of = {node: place for place, node in enumerate(by_node)}

    def __contains__(self, rank: int) -> bool:
        return self.parties.find(rank) is not None

    def near(self, node: int, holders: Collection[int]) -> list[tuple[int, ...]]:
        """Those of a node that are no holders, each by itself."""
        ranks = self.parties[self.place_of[node]] if node in self.place_of else ()
        return [(rank,) for rank in ranks if rank not in holders]


class Routes:
    """The ways of what the ranks `holders` have and the other ranks of `wanting` lack.

    A node with holders serves its own demanders, each for itself. Every other node is one party: what it lacks enters
    it once.
    """

    def __init__(self, holders: Collection[int], wanting: Wanting, nodes: Nodes, *, passing: bool) -> None:
        """`passing`: demanders have nothing else to send, and may pass on where no slow link asks for it too."""
        self._nodes, self._wanting, self._holders = nodes, wanting, frozenset(holders)
        givers = _by_node(holders, nodes)
        near = {node: wanting.near(node, self._holders) for node in givers}
        self._near = {node: Deal(givers[node], Parties(takers), passing) for node, takers in near.items() if takers}
        away = wanting.parties.without([wanting.place_of[node] for node in givers if node in wanting.place_of])
        self._far = [Deal(tuple(sorted(holders)), away, passing)] if len(away) else []
        self.num_turns = lcm(*(deal.num_turns for deal in (*self._near.values(), *self._far)))

    def edges(self, rank: int, turn: Turn) -> Iterator[Edge]:
        """The transfers of a turn that `rank` takes part in."""
        near = self._near.get(self._nodes.of(rank))
        deals = [near, *self._far] if near else self._far
        if rank in self._wanting and rank not in self._holders:
            yield deals[0].received(rank, turn)
        for deal in deals:
            yield from deal.sent(rank, turn)


def _by_node(ranks: Iterable[int], nodes: Nodes) -> dict[int, tuple[int, ...]]:
    """The ranks of each node, all ascending."""
    found: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault(nodes.of(rank), []).append(rank)
    return {node: tuple(members) for node, members in found.items()}
