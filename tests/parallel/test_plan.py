"""Plans of random small maps, checked element by element against what any plan must do; and of a very large world."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from hybridflow.models.config import Family, Head, ModelConfig
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel import cells
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.mesh import Grid, Layout
from hybridflow.parallel.nodes import ONE_NODE, Nodes
from hybridflow.parallel.plan import Copy, TransferPlan, lower_bound_numel
from hybridflow.parallel.routes import Deal, Parties, Turn
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.shard_map import ShardMap

Element = tuple[str, tuple[int, ...]]
SHAPES = {"bias": (7,), "weight": (6, 5), "experts": (3, 2, 4)}


def map_of(shapes: dict[str, tuple[int, ...]], boxes: dict[int, list[Box]],
           kinds: dict[int, int] | None = None) -> ShardMap:
    """Every box in a storage of its own."""
    return ShardMap(shapes, tuple(boxes), lambda rank: [Shard.of_rows(box, f"{place} of {box.name}")
                                                        for place, box in enumerate(boxes[rank])],
                    (lambda rank: kinds[rank]) if kinds else (lambda rank: rank))


def random_box(rng: random.Random, name: str) -> Box:
    ends = [sorted(rng.sample(range(size + 1), 2)) for size in SHAPES[name]]
    return Box(name, tuple(lo for lo, _ in ends), tuple(hi for _, hi in ends))


def random_maps(rng: random.Random) -> tuple[ShardMap, ShardMap]:
    """Boxes that overlap as they like; what the source lacks of a tensor some rank holds in whole; kinds have replicas.
    """
    def some(ranks: Sequence[int], most: int) -> ShardMap:
        kinds = {rank: rng.randrange(3) for rank in ranks}
        boxes = {kind: [random_box(rng, rng.choice(list(SHAPES))) for _ in range(rng.randint(0, most))]
                 for kind in range(3)}
        return map_of(SHAPES, {rank: boxes[kind] + (whole if kind == kinds[ranks[0]] else [])
                               for rank, kind in kinds.items()}, kinds)

    whole = [Box.whole(name, shape) for name, shape in SHAPES.items()]
    ranks = list(range(rng.randint(1, 9)))
    src = some(rng.sample(ranks, rng.randint(1, len(ranks))), 3)
    whole = rng.choice((whole, []))
    return src, some(rng.sample(ranks, rng.randint(1, len(ranks))), 4)


def elements(box: Box) -> Iterator[Element]:
    return ((box.name, at) for at in product(*map(range, box.lo, box.hi)))


def held(shard_map: ShardMap, rank: int) -> Counter[Element]:
    return Counter(element for box in {s.box for s in shard_map.shards(rank)} for element in elements(box))


def carry_out(plan: TransferPlan, ranks: Sequence[int]) -> dict[int, Counter[Element]]:
    """How often each element arrives at each rank; every copy must be sent by who has it then."""
    src, dst = plan.src, plan.dst
    arrived: dict[int, Counter[Element]] = {rank: Counter() for rank in ranks}
    for hop in range(3):
        before = {rank: Counter(count) for rank, count in arrived.items()}
        for copy in (c for rank in ranks for c in plan.of_rank(rank) if c.dest == rank and c.hop == hop):
            assert copy.src_shard in (src if hop == 0 else dst).shards(copy.source)
            assert copy.src_shard.box.intersect(copy.box) == copy.box
            if hop > 0:
                assert all(element in before[copy.source] for element in elements(copy.box))
            assert copy.dst_shards == tuple(s for s in dst.shards(copy.dest) if s.box.intersect(copy.box) == copy.box)
            arrived[copy.dest].update(elements(copy.box))
    assert all(copy.hop < 3 for rank in ranks for copy in plan.of_rank(rank))
    return arrived


def by_wire(plan: TransferPlan, ranks: Sequence[int], sending: bool) -> dict[tuple[int, int, int], list[Copy]]:
    wires: dict[tuple[int, int, int], list[Copy]] = defaultdict(list)
    for rank in ranks:
        for copy in plan.of_rank(rank):
            if rank == (copy.source if sending else copy.dest):
                wires[copy.source, copy.dest, copy.hop].append(copy)
    return wires


@pytest.mark.parametrize("nodes", [ONE_NODE, Nodes(1), Nodes(2), Nodes(4)], ids=str)
@pytest.mark.parametrize("seed", range(60))
def test_random_maps(seed: int, nodes: Nodes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cells, "MIN_CUT", 1 if seed % 2 else cells.MIN_CUT)  # small as they are, cut them too
    src, dst = random_maps(random.Random(seed))
    plan, ranks = TransferPlan(src, dst, nodes), tuple(range(9))
    arrived = carry_out(plan, ranks)
    for rank in ranks:
        assert set(arrived[rank]) == set(held(dst, rank)) and set(arrived[rank].values()) <= {1}
        assert plan.received_numel(rank) == lower_bound_numel(src, dst, rank)
        assert plan.received_numel(rank) == len(set(held(dst, rank)) - set(held(src, rank)))
        assert all(rank in (copy.source, copy.dest) for copy in plan.of_rank(rank))
    assert by_wire(plan, ranks, sending=True) == by_wire(plan, ranks, sending=False)
    for rank in ranks:
        hops = [copy.hop for copy in plan.of_rank(rank)]
        assert hops == sorted(hops)
    assert slow_numel(plan, nodes) == needed_over_slow_links(src, dst, nodes, ranks)


def slow_numel(plan: TransferPlan, nodes: Nodes) -> int:
    return sum(copy.box.numel for copy in plan.copies if nodes.of(copy.source) != nodes.of(copy.dest))


def needed_over_slow_links(src: ShardMap, dst: ShardMap, nodes: Nodes, ranks: Sequence[int]) -> int:
    """What the ranks of each node want and none of them has, once."""
    has, wants = defaultdict(set), defaultdict(set)
    for rank in ranks:
        has[nodes.of(rank)] |= set(held(src, rank))
        wants[nodes.of(rank)] |= set(held(dst, rank))
    return sum(len(wants[node] - has[node]) for node in wants)


@pytest.mark.parametrize("seed", range(5))
def test_every_rank_plans_alone_what_it_plans_among_others(seed: int):
    src, dst = random_maps(random.Random(seed))
    together = TransferPlan(src, dst, Nodes(3))
    for rank in reversed(range(9)):
        assert TransferPlan(src, dst, Nodes(3)).of_rank(rank) == together.of_rank(rank)


def test_copies_are_each_others_and_each_once():
    src, dst = random_maps(random.Random(7))
    plan = TransferPlan(src, dst)
    assert Counter(plan.copies) == Counter(c for rank in plan.ranks for c in plan.of_rank(rank) if c.dest == rank)
    assert plan.wires(0) == {(c.source, c.dest) for c in plan.copies if c.source != c.dest and 0 in (c.source, c.dest)}


SIZE = 3 * 2**20  # elements of the matrix below: large against the smallest cut


def replicas(ranks: Sequence[int], tp: int = 1) -> ShardMap:
    """`w` in tp row blocks; ranks of the same place modulo tp hold the same block."""
    rows = 3072 // tp
    return ShardMap({"w": (3072, 1024)}, tuple(ranks),
                    lambda r: [Shard.of_rows(Box("w", (ranks.index(r) % tp * rows, 0),
                                                 ((ranks.index(r) % tp + 1) * rows, 1024)), "w")],
                    lambda r: ranks.index(r) % tp)


def sent(plan: TransferPlan, ranks: Sequence[int]) -> list[float]:
    """In units of the matrix."""
    return [plan.sent_numel(rank) / SIZE for rank in ranks]


def test_one_holder_is_no_funnel_for_disjoint_replicas():
    plan = TransferPlan(replicas([0]), replicas(range(1, 9)))
    assert sent(plan, [0]) == [1.0]
    assert sent(plan, range(1, 9)) == pytest.approx([7 / 8] * 8)
    assert max(copy.hop for copy in plan.copies) == 1


def test_a_model_enters_each_node_once_and_leaves_the_source_once():
    nodes = Nodes(4)
    plan = TransferPlan(replicas(range(4), tp=4), replicas(range(4, 20), tp=1), nodes)
    assert slow_numel(plan, nodes) == 4 * SIZE
    assert sent(plan, range(4)) == pytest.approx([1 / 4] * 4)
    # each node hands 3/4 of its model to the other three nodes, and each rank 3/4 of what entered to its mates
    assert sent(plan, range(4, 20)) == pytest.approx([3 / 16 + 3 / 4] * 16, rel=0.02)
    assert {copy.hop for copy in plan.copies} == {0, 1, 2}


@pytest.mark.parametrize(("holders", "demanders"), [(3, 2), (2, 3), (4, 1), (5, 4), (3, 7), (8, 8), (1, 1)])
def test_equal_holders_send_equally_much(holders: int, demanders: int):
    """The demanders hold something too, so that they do not pass on."""
    shapes = {"w": (3072, 1024), "other": (1, 1)}
    w, other = Box.whole("w", shapes["w"]), Box.whole("other", (1, 1))
    ranks = range(holders + demanders)
    src = map_of(shapes, {rank: [w if rank < holders else other] for rank in ranks})
    plan = TransferPlan(src, map_of(shapes, {rank: [w] for rank in ranks}))
    assert sent(plan, range(holders)) == pytest.approx([demanders / holders] * holders, rel=0.05)
    assert sum(len({c.source for c in plan.of_rank(rank) if c.source != rank == c.dest}) for rank in ranks
               ) <= holders + demanders - 1  # no more wires than an even division takes
    assert {copy.hop for copy in plan.copies} == {0}


def test_near_holders_serve_near_demanders():
    nodes = Nodes(4)
    src = replicas([0, 1, 4, 5, 6])
    dst = replicas(range(12))
    plan = TransferPlan(src, dst, nodes)
    for rank in (2, 3, 7):
        assert all(nodes.of(copy.source) == nodes.of(rank) for copy in plan.of_rank(rank) if copy.dest == rank)
    assert slow_numel(plan, nodes) == SIZE
    entered = [sum(c.box.numel for c in plan.of_rank(rank) if c.dest == rank and c.hop == 0) for rank in range(8, 12)]
    assert entered == pytest.approx([SIZE / 4] * 4, rel=0.15)


def test_large_cells_are_cut_where_turns_end_and_small_ones_stay_whole():
    shapes = {f"norm{i}": (1024,) for i in range(6)} | {"experts": (2, 512, 512), "one row": (1, 2**18)}
    every = [Box.whole(name, shape) for name, shape in shapes.items()]
    plan = TransferPlan(map_of(shapes, {0: every, 1: every, 2: every}), map_of(shapes, {3: every}))
    copies = [copy for copy in plan.of_rank(3)]
    assert all(copy.box.shape == (1024,) for copy in copies if copy.box.name.startswith("norm"))
    numel = sum(box.numel for box in every)
    assert [plan.sent_numel(rank) for rank in range(3)] == pytest.approx([numel / 3] * 3, rel=1 / 8)


def test_a_box_that_nobody_holds_is_named():
    whole = map_of({"w": (4, 2)}, {0: [Box.whole("w", (4, 2))]})
    half = map_of({"w": (4, 2)}, {0: [Box("w", (0, 0), (2, 2))]})
    with pytest.raises(ValueError, match=r"w\[\(2, 0\):\(4, 2\)\] wanted by rank 0"):
        TransferPlan(half, whole)
    with pytest.raises(ValueError, match="disagree on 1 tensors"):
        TransferPlan(map_of({"w": (4, 3)}, {0: []}), whole)


@pytest.mark.parametrize(("box", "said"), [
    (Box("w", (0, 0), (5, 2)), r"w\[\(0, 0\):\(5, 2\)\] of \(4, 2\)"), (Box("w", (0,), (4,)), r"w\[\(0,\):\(4,\)\] of"),
    (Box("v", (0,), (1,)), "of an unknown tensor"), (Box("scalar", (), ()), r"scalar\[\(\):\(\)\] of \(\)")])
def test_a_box_that_is_no_part_of_its_tensor_is_refused(box: Box, said: str):
    shapes: dict[str, tuple[int, ...]] = {"w": (4, 2), "scalar": ()}
    good = map_of(shapes, {0: [Box.whole("w", (4, 2))]})
    bad = ShardMap(shapes, (0,), lambda rank: [Shard(box, "storage", 0, (1,) * len(box.lo))])
    with pytest.raises(ValueError, match=f"1 boxes of the destination are no part .*{said}"):
        TransferPlan(good, bad)
    with pytest.raises(ValueError, match="boxes of the source are no part"):
        TransferPlan(bad, good)


def rows_map(rows_of: list[range]) -> ShardMap:
    """A table of 2,000 rows in which every row of a rank is a box."""
    return ShardMap({"rows": (2000, 3)}, tuple(range(4)), lambda rank: [
        Shard.of_rows(Box("rows", (row, 0), (row + 1, 3)), "rows", place) for place, row in enumerate(rows_of[rank])])


def test_planning_looks_at_a_few_boxes_for_each_copy(monkeypatch: pytest.MonkeyPatch):
    calls, intersect = [], Box.intersect
    monkeypatch.setattr(Box, "intersect", lambda box, other: calls.append(box) or intersect(box, other))
    dealt, turned = [range(r, 2000, 4) for r in range(4)], [range((r + 1) % 4, 2000, 4) for r in range(4)]
    whole = ShardMap({"rows": (2000, 3)}, tuple(range(4)),
                     lambda rank: [Shard.of_rows(Box.whole("rows", (2000, 3)), "rows")])
    for dest, copies in ((rows_map(turned), 2000), (whole, 8000)):
        calls.clear()
        plan = TransferPlan(rows_map(dealt), dest)
        assert len(plan.copies) == copies and len(calls) <= 2 * copies


@pytest.mark.parametrize(("givers", "parties"), [*product(range(1, 8), range(1, 8))])
def test_deals_are_even_over_their_turns(givers: int, parties: int):
    deal = Deal(tuple(range(givers)), Parties([(100 + party,) for party in range(parties)]), passing=False)
    turns = [Turn(index, deal.num_turns) for index in range(deal.num_turns)]
    assert {sum(len(list(deal.sent(giver, turn))) for turn in turns) for giver in range(givers)} == {
        parties * deal.num_turns // givers}


LLAMA_405B = ModelConfig(Family.LLAMA, 128256, 16384, 53248, num_layers=126, num_heads=128, num_kv_heads=8,
                         head_dim=128)
UNEVEN = (7, *[8] * 14, 7)


@pytest.mark.parametrize(("layout", "vpp"), [(Layout(8, 1, 2048), 1), (Layout(8, 8, 256), 2)], ids=str)
def test_one_rank_of_16384_plans_without_the_others(layout: Layout, vpp: int, monkeypatch: pytest.MonkeyPatch):
    src = decoder_shard_map(LLAMA_405B, Grid.of(Layout(8, 16, 128)), Head.LANGUAGE_MODEL, Chunks(16), UNEVEN)
    dst = decoder_shard_map(LLAMA_405B, Grid.of(layout), Head.LANGUAGE_MODEL, Chunks(layout.pp, vpp),
                            UNEVEN if layout.pp * vpp == 16 else (126,))
    made, distinct = [], len({s.box for m in (src, dst) for ranks in m.kinds.values() for s in m.shards(ranks[0])})
    intersect = Box.intersect
    monkeypatch.setattr(Box, "intersect", lambda box, other: made.append(box) or intersect(box, other))
    plan = TransferPlan(src, dst, Nodes(8))
    assert plan.received_numel(5003) == lower_bound_numel(src, dst, 5003)
    assert len(plan.of_rank(5003)) < 3000 and len(made) < 20 * distinct
