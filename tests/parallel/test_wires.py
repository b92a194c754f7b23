"""Rounds hold everything once, both ends of a wire see the same, and no rank can wait for ever."""

from __future__ import annotations

import random

import pytest

from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.nodes import Nodes
from hybridflow.parallel.plan import Copy, TransferPlan
from hybridflow.parallel.wires import (
    Piece,
    Round,
    Wire,
    cut_in_rounds,
    first_reads,
    messages_of,
    room_of_wires,
    rounds_of,
    wires_of,
)
from tests.parallel.test_plan import random_maps

RANKS = range(9)
LEAST = 3  # elements of a message of its own


def copy_of(box: Box, source: int = 0, dest: int = 1, storage: str = "s", hop: int = 0) -> Copy:
    shard = Shard.of_rows(box, storage)
    return Copy(source, dest, box, shard, (shard,), hop)


def boxes_of(pieces: list[Piece]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(piece.box.lo, piece.box.hi) for piece in pieces]


def test_rounds_are_full_and_cut_at_rows_where_they_can_be():
    copies = [copy_of(Box.whole("w", (5, 4))), copy_of(Box.whole("b", (3,)))]
    first, second, third = cut_in_rounds(copies, 9)
    assert boxes_of(first) == [((0, 0), (2, 4)), ((2, 0), (3, 1))]
    assert boxes_of(second) == [((2, 1), (3, 4)), ((3, 0), (4, 4)), ((4, 0), (5, 2))]
    assert boxes_of(third) == [((4, 2), (5, 4)), ((0,), (3,))]


def piece_at(name: str, size: int, source: int, *places: tuple[str, int]) -> Piece:
    """A vector from `source` in storage `s` of the sender to each (storage, offset) of the receiver."""
    box = Box.whole(name, (size,))
    shards = tuple(Shard.of_rows(box, storage, offset) for storage, offset in places)
    return Piece(Copy(0, 1, box, Shard.of_rows(box, "s", source), shards), box)


def sent_as(pieces: list[Piece]) -> list[tuple[str, int]]:
    """The tensors of each message, and in how many parts they lie."""
    return [("".join(piece.box.name for piece in message.pieces), len(message.parts))
            for message in messages_of(7, pieces, LEAST)]


def test_large_pieces_travel_alone_and_small_ones_packed():
    a, b, c = piece_at("a", 2, 0, ("d", 0)), piece_at("b", 4, 10, ("d", 20)), piece_at("c", 1, 30, ("d", 5))
    assert sent_as([a, b, c]) == [("b", 1), ("ac", 2)]
    box = Box.whole("w", (2, 3))
    columns = Piece(Copy(0, 1, box, Shard(box, "s", 0, (1, 2)), (Shard.of_rows(box, "d"),)), box)
    assert sent_as([columns]) == [("w", 1)]


def test_what_follows_at_both_ends_is_one_message():
    q, k, v = (piece_at(name, size, at, ("d", 5 + at)) for name, size, at in (("q", 4, 0), ("k", 2, 4), ("v", 2, 6)))
    assert sent_as([q, k, v]) == [("qkv", 1)]
    assert sent_as([q, v, k]) == [("q", 1), ("vk", 2)], "in the order of the memory only"
    assert sent_as([q, piece_at("k", 2, 4, ("d", 10)), v]) == [("q", 1), ("kv", 2)], "a gap at the receiver"
    assert sent_as([q, piece_at("k", 2, 4, ("e", 9))]) == [("q", 1), ("k", 1)], "another storage"
    twice = [piece_at("q", 4, 0, ("d", 0), ("e", 0)), piece_at("k", 2, 4, ("d", 4), ("e", 4))]
    assert sent_as(twice) == [("qk", 1)]
    assert sent_as([twice[0], piece_at("k", 2, 4, ("d", 4), ("e", 5))]) == [("q", 1), ("k", 1)]


def test_room_is_shared_by_load_and_never_more_than_there_is():
    large, small, later = (Wire(0, 0, 1), Wire(0, 2, 0), Wire(1, 0, 1))
    wires = {large: [copy_of(Box.whole("w", (900,)))], small: [copy_of(Box.whole("w", (100,)))],
             later: [copy_of(Box.whole("w", (5,)))]}
    assert room_of_wires(wires, 80) == {large: 10 + 54, small: 10 + 6, later: 5}
    assert set(room_of_wires(wires, 0).values()) == {1}


def all_rounds(plan: TransferPlan, numel: int) -> dict[int, list[Round]]:
    """As the ranks would make them, each of its own copies and what it has agreed on with its peers."""
    offers = {rank: room_of_wires(wires_of(plan.of_rank(rank)), numel) for rank in RANKS}
    return {rank: rounds_of(rank, plan.of_rank(rank),
                            {wire: min(offers[wire.source][wire], offers[wire.dest][wire]) for wire in offers[rank]},
                            LEAST) for rank in RANKS}



def run_to_the_end(rounds: dict[int, list[Round]]) -> None:
    """Every rank posts, then waits for the round before (or first, where it passes on); messages of a direction meet in
    order. Fails where nobody can go on.
    """
    posted = {rank: 0 for rank in RANKS}
    done = {rank: 0 for rank in RANKS}
    sent: dict[tuple[int, int], list[tuple[Piece, ...]]] = {}
    awaited: dict[tuple[int, int], list[tuple[Piece, ...]]] = {}

    def is_over(rank: int, number: int) -> bool:
        return all(message.pieces in awaited.get((rank, message.peer), []) for message in rounds[rank][number].sends) \
            and all(message.pieces in sent.get((message.peer, rank), []) for message in rounds[rank][number].receives)

    def may_post(rank: int) -> bool:
        number = posted[rank]
        if number == len(rounds[rank]):
            return False
        now, before = rounds[rank][number], rounds[rank][number - 1]
        all_done = number > 0 and now.passes_on and before.hop < now.hop
        return done[rank] >= (number if all_done else number - 1)

    moved = True
    while moved:
        moved = False
        for rank in RANKS:
            if may_post(rank):
                now = rounds[rank][posted[rank]]
                for message in now.sends:
                    sent.setdefault((rank, message.peer), []).append(message.pieces)
                for message in now.receives:
                    awaited.setdefault((message.peer, rank), []).append(message.pieces)
                posted[rank], moved = posted[rank] + 1, True
            if done[rank] < posted[rank] and is_over(rank, done[rank]):
                done[rank], moved = done[rank] + 1, True
    assert done == {rank: len(rounds[rank]) for rank in RANKS}
    assert sent == awaited, "messages of a direction do not meet in order"


@pytest.mark.parametrize("nodes", [Nodes(), Nodes(2)], ids=str)
@pytest.mark.parametrize("seed", range(25))
def test_no_rank_waits_for_ever_and_all_arrives(seed: int, nodes: Nodes):
    plan = TransferPlan(*random_maps(random.Random(seed)), nodes)
    rounds = all_rounds(plan, 12)
    run_to_the_end(rounds)
    for rank in RANKS:
        arrived = sum(message.numel for each in rounds[rank] for message in each.receives)
        assert arrived == plan.received_numel(rank)
        assert sum(message.numel for each in rounds[rank] for message in each.sends) == plan.sent_numel(rank)
        kept = [(each.box, each.source, each.place) for now in rounds[rank] for each in now.kept]
        wanted = [(copy.box, copy.src_shard, place) for copy in plan.of_rank(rank) if copy.source == copy.dest
                  for place in copy.dst_shards]
        assert sorted(kept, key=repr) == sorted(wanted, key=repr)


def test_what_is_kept_goes_with_what_is_sent_of_it_and_else_evenly():
    sent = [copy_of(Box("w", (row,), (row + 4,)), storage=f"share.{row}") for row in range(0, 16, 4)]
    kept = [copy_of(Box("w", (12,), (16,)), 0, 0, "share.12")]
    alone = [copy_of(Box.whole(name, (4,)), 0, 0, name) for name in "abcd"]
    rounds = rounds_of(0, [*sent, *kept, *alone], {Wire(0, 0, 1): 4}, LEAST)
    assert first_reads(rounds) == [{"share.0", "a"}, {"share.4", "b"}, {"share.8", "c"}, {"share.12", "d"}]
    storages = [[kept.source.storage for kept in each.kept] for each in rounds]
    assert storages == [["a"], ["b"], ["c"], ["share.12", "d"]]


def test_what_is_kept_is_alike_where_it_lies_at_the_same_place():
    box, part = Box.whole("w", (4, 6)), Box("w", (1, 0), (3, 6))
    rows = Shard.of_rows(box, "rows")
    places = {rows: True, Shard.of_rows(box, "other"): True, Shard(box, "columns", 0, (1, 4)): False,
              Shard.of_rows(part, "part"): False, Shard.of_rows(part, "part", 1): True}
    copy = Copy(0, 0, part, rows, tuple(places))
    [only] = rounds_of(0, [copy], {}, LEAST)
    assert [kept.alike for kept in only.kept] == list(places.values())


def test_what_is_passed_on_is_not_read_from_the_source_map():
    [only] = rounds_of(0, [copy_of(Box.whole("w", (4,)), hop=1)], {Wire(1, 0, 1): 4}, LEAST)
    assert only.passes_on and first_reads([only]) == [frozenset()]
