"""Rounds: the copies of one rank, cut into messages of bounded size and put in an order in which no rank can lock up.

Pure planning, on top of a plan: it keeps no tensor and never talks. `transfer` carries the rounds out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import prod

from torch import Tensor

from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.plan import Copy


@dataclass(frozen=True, order=True)
class Wire:
    """One direction between two ranks, at one hop of the plan."""

    hop: int
    source: int
    dest: int

    def peer(self, rank: int) -> int:
        """The other end."""
        return self.dest if rank == self.source else self.source


@dataclass(frozen=True)
class Piece:
    """A part of a copy that travels as one."""

    copy: Copy
    box: Box


@dataclass(frozen=True)
class Spot:
    """A strided view, in elements, of a storage; flat where it is one stretch of it."""

    storage: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, storages: Mapping[str, Tensor]) -> Tensor:
        storage = storages[self.storage]
        return storage.as_strided(self.shape, self.strides, storage.storage_offset() + self.offset)

    def is_followed_by(self, other: Spot) -> bool:
        return ((self.storage, self.strides, other.strides) == (other.storage, (1,), (1,))
                and self.offset + self.shape[0] == other.offset)


@dataclass(frozen=True)
class Part:
    """Of a message: where a piece, or several that follow each other at both ends, lie. Flat there if without gaps.

    Attributes:
        source: at the sender.
        places: at the receiver, wherever it is wanted.
    """

    source: Spot
    places: tuple[Spot, ...]

    @classmethod
    def of(cls, piece: Piece) -> Part:
        box, shards = piece.box, (piece.copy.src_shard, *piece.copy.dst_shards)
        if all(shard.is_contiguous(box) for shard in shards):
            return cls.at(Spot(shard.storage, shard.offset_of(box), (box.numel,), (1,)) for shard in shards)
        return cls.at(Spot(shard.storage, shard.offset_of(box), box.shape, shard.strides) for shard in shards)

    @classmethod
    def at(cls, spots: Iterable[Spot]) -> Part:
        """The sender's first."""
        source, *places = spots
        return cls(source, tuple(places))

    def with_next(self, other: Part) -> Part | None:
        """Both as one; None if `other` does not follow in the memory of both ends."""
        mine, others = (self.source, *self.places), (other.source, *other.places)
        if len(mine) != len(others) or not all(map(Spot.is_followed_by, mine, others)):
            return None
        return self.at(replace(spot, shape=(spot.shape[0] + after.shape[0],)) for spot, after in zip(mine, others))


@dataclass(frozen=True)
class Message:
    """Pieces that travel to or from `peer` together, one after the other.

    Attributes:
        parts: the pieces, joined where they follow each other at both ends.
    """

    peer: int
    pieces: tuple[Piece, ...]
    parts: tuple[Part, ...]

    @cached_property
    def numel(self) -> int:
        return sum(piece.box.numel for piece in self.pieces)


@dataclass(frozen=True)
class Kept:
    """A box that a rank copies for itself.

    Attributes:
        alike: whether it lies in both storages at the same place; if these share memory, there is nothing to copy.
    """

    box: Box
    source: Shard
    place: Shard
    alike: bool

    @classmethod
    def of(cls, box: Box, source: Shard, place: Shard) -> Kept:
        alike = (source.strides, source.offset_of(box)) == (place.strides, place.offset_of(box))
        return cls(box, source, place, alike)


@dataclass
class Round:
    """What this rank sends and receives at once, and what it copies for itself meanwhile.

    Attributes:
        passes_on: whether it sends something that came in an earlier hop.
    """

    hop: int = 0
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)

    @property
    def passes_on(self) -> bool:
        return self.hop > 0 and bool(self.sends)


def wires_of(copies: Iterable[Copy]) -> dict[Wire, list[Copy]]:
    """The copies that travel, by wire, each in plan order: both ends see the same."""
    found: dict[Wire, list[Copy]] = defaultdict(list)
    for copy in copies:
        if copy.source != copy.dest:
            found[Wire(copy.hop, copy.source, copy.dest)].append(copy)
    return dict(sorted(found.items()))


def room_of_wires(wires: Mapping[Wire, Sequence[Copy]], numel: int) -> dict[Wire, int]:
    """How many elements each wire of this rank may carry in a round, of `numel` for all of a hop together.

    A quarter is dealt out evenly and the rest in proportion to what the wires carry, so that all end in about the same
    round and no message of the way there is tiny.
    """
    loads = {wire: sum(copy.box.numel for copy in copies) for wire, copies in wires.items()}
    by_hop: dict[int, list[int]] = defaultdict(list)
    for wire, load in loads.items():
        by_hop[wire.hop].append(load)

    def part(hop: int, load: int) -> int:
        return numel // (4 * len(by_hop[hop])) + 3 * numel * load // (4 * sum(by_hop[hop]))
    return {wire: max(1, min(load, part(wire.hop, load))) for wire, load in loads.items()}


def cut_in_rounds(copies: Iterable[Copy], room: int) -> list[list[Piece]]:
    """All elements in plan order, `room` of them in each round but the last.

    Both ends of a wire cut alike: they see the same copies in the same order.
    """
    rounds: list[list[Piece]] = []
    left = 0
    for copy in copies:
        rest = [copy.box]
        while rest:
            if left == 0:
                rounds.append([])
                left = room
            head, tail = _split(rest.pop(), left)
            rounds[-1].append(Piece(copy, head))
            left -= head.numel
            rest += reversed(tail)
    return rounds


def messages_of(peer: int, pieces: Sequence[Piece], least: int) -> list[Message]:
    """A message of its own for each part of at least `least` elements, and one for all that are smaller.

    Only what both ends know decides, so that they do the same.
    """
    messages, packed = [], []
    for part, joined in _joined(pieces):
        if sum(piece.box.numel for piece in joined) >= least:
            messages.append(Message(peer, tuple(joined), (part,)))
        else:
            packed.append((part, joined))
    if packed:
        parts, small = zip(*packed)
        messages.append(Message(peer, tuple(chain.from_iterable(small)), parts))
    return messages


def rounds_of(rank: int, copies: Sequence[Copy], room: Mapping[Wire, int], least: int) -> list[Round]:
    """The rounds of `rank`, at least one: what travels, and with it what the rank keeps.

    No rank can wait for ever. Everything on a wire has a number in its hop, (hop, ordinal); both ends give it the same,
    and every rank takes its rounds in the order of these numbers, starting one when all before the last are finished
    (or all, where it passes on what has just come). Let k be the smallest number that is unfinished anywhere. Whoever
    has a round k has nothing unfinished before it, so both ends of each of its wires start it, and it ends. The same
    holds for NCCL, where a round is one group and a later group waits for an earlier one.
    """
    rounds: dict[tuple[int, int], Round] = defaultdict(Round)
    for wire, travelling in wires_of(copies).items():
        for ordinal, pieces in enumerate(cut_in_rounds(travelling, room[wire])):
            found = rounds[wire.hop, ordinal]
            found.hop = wire.hop
            ends = found.sends if wire.source == rank else found.receives
            ends += messages_of(wire.peer(rank), pieces, least)
    ordered = [rounds[key] for key in sorted(rounds)] or [Round()]
    _deal_kept([copy for copy in copies if copy.source == copy.dest], ordered)
    return ordered


def first_reads(rounds: Sequence[Round]) -> list[frozenset[str]]:
    """By round, the storages of the source map that it is the first to read."""
    seen: set[str] = set()
    fresh = []
    for each in rounds:
        read = {kept.source.storage for kept in each.kept} | _sent_storages(each)
        fresh.append(frozenset(read - seen))
        seen |= read
    return fresh


def _joined(pieces: Sequence[Piece]) -> list[tuple[Part, list[Piece]]]:
    """Pieces in order, joined to as few parts as can be."""
    found: list[tuple[Part, list[Piece]]] = []
    for piece in pieces:
        part = Part.of(piece)
        longer = found[-1][0].with_next(part) if found else None
        if longer is None:
            found.append((part, [piece]))
        else:
            found[-1] = longer, [*found[-1][1], piece]
    return found


def _sent_storages(each: Round) -> set[str]:
    if each.passes_on:
        return set()
    return {piece.copy.src_shard.storage for message in each.sends for piece in message.pieces}


def _deal_kept(kept: Sequence[Copy], rounds: Sequence[Round]) -> None:
    """Local copies go with the round that reads their storage anyway; the others are dealt out evenly, so that what has
    to be ready for them need not be ready at the start.
    """
    at = {name: number for number, names in enumerate(first_reads(rounds)) for name in names}
    spread = {copy.src_shard.storage for copy in kept} - at.keys()
    total, done = sum(copy.box.numel for copy in kept if copy.src_shard.storage in spread), 0
    for copy in kept:
        storage = copy.src_shard.storage
        if storage in spread:
            at.setdefault(storage, done * len(rounds) // total)
            done += copy.box.numel
        rounds[at[storage]].kept += [Kept.of(copy.box, copy.src_shard, place) for place in copy.dst_shards]


def _split(box: Box, room: int) -> tuple[Box, list[Box]]:
    """At most `room` elements from the start of `box`, and the rest of it in order.

    Example: of 5 x 4 elements and room for 9, two rows, and a rest of three; with room for 3, three quarters of a row.
    """
    if box.numel <= room:
        return box, []
    dim = next(d for d, size in enumerate(box.shape) if size > 1)
    rows = room // prod(box.shape[dim + 1:])
    if rows > 0:
        head, others = _rows(box, dim, rows)
        return head, [others]
    first, others = _rows(box, dim, 1)
    head, rest = _split(first, room)
    return head, [*rest, others]


def _rows(box: Box, dim: int, rows: int) -> tuple[Box, Box]:
    """The first rows along `dim`, and the others."""
    at = box.lo[dim] + rows
    return (replace(box, hi=(*box.hi[:dim], at, *box.hi[dim + 1:])),
            replace(box, lo=(*box.lo[:dim], at, *box.lo[dim + 1:])))
