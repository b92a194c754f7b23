"""Assignments against the best of every order of the ranks, and against numbers that can be worked out by hand."""

from collections.abc import Callable, Iterator
from itertools import permutations

import numpy as np
import pytest

from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel import assign_block, assign_task
from hybridflow.parallel.assign import assign
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.mesh import Grid, Layout
from hybridflow.parallel.nodes import ONE_NODE, Nodes
from hybridflow.parallel.plan import lower_bound_numel
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.shard_map import ShardMap
from tests.engine.models import tiny_model

MODELS = {"gqa": tiny_model(), "tied": tiny_model(tie_word_embeddings=True),
          "one kv head": tiny_model(num_kv_heads=1, qkv_bias=True)}
EVEN = tiny_model(num_layers=8, num_heads=8, num_kv_heads=8, head_dim=2, vocab_size=64)
FOUR = [Layout(tp, pp, 4 // tp // pp) for tp in (1, 2, 4) for pp in (1, 2, 4) if tp * pp <= 4]
EIGHT = [Layout(tp, pp, 8 // tp // pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4) if tp * pp <= 8]
Maps = Callable[[Grid], ShardMap]


def decoder(model: ModelConfig, vpp: int = 1, layers: tuple[int, ...] | None = None) -> Maps:
    return lambda grid: decoder_shard_map(model, grid, Head.LANGUAGE_MODEL, Chunks(grid.layout.pp, vpp), layers)


def held(shard_map: ShardMap, rank: int) -> np.ndarray:
    """Of all elements of the model, one after another, which the rank holds."""
    parts = {name: np.zeros(shape, dtype=bool) for name, shape in shard_map.shapes.items()}
    for shard in shard_map.shards(rank):
        parts[shard.box.name][shard.box.slices] = True
    return np.concatenate([part.reshape(-1) for part in parts.values()])


class Counted:
    """What any order of the ranks would move, counted element by element."""

    def __init__(self, src: ShardMap, dst: ShardMap, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.have = np.stack([held(src, rank) for rank in ranks])
        self.want = np.stack([held(dst, rank) for rank in ranks])  # of each place
        self.received = (self.want[None] & ~self.have[:, None]).sum(axis=2)  # [rank, place]

    def total(self, order: tuple[int, ...]) -> int:
        return sum(int(self.received[self.ranks.index(rank), place]) for place, rank in enumerate(order))

    def far(self, order: tuple[int, ...], nodes: Nodes) -> int:
        """What enters nodes, once each."""
        count = 0
        for node in {nodes.of(rank) for rank in self.ranks}:
            near = [nodes.of(rank) == node for rank in self.ranks]
            wanted = self.want[[place for place, rank in enumerate(order) if nodes.of(rank) == node]].any(axis=0)
            count += int((wanted & ~self.have[near].any(axis=0)).sum())
        return count

    def least(self) -> int:
        """The least total of all orders, by the set of ranks that the first places have taken."""
        best = {0: 0}
        for place in range(len(self.ranks)):
            following: dict[int, int] = {}
            for taken, cost in best.items():
                for rank in range(len(self.ranks)):
                    if not taken >> rank & 1:
                        key, new = taken | 1 << rank, cost + int(self.received[rank, place])
                        following[key] = min(new, following.get(key, new))
            best = following
        [least] = best.values()
        return least


def solved(train: Grid, source: Maps, generation: Layout, dest: Maps, nodes: Nodes = ONE_NODE,
           tp_within_node: bool = False) -> tuple[Grid, Counted]:
    src = source(train)
    grid = assign(src, train, generation, dest, nodes=nodes, tp_within_node=tp_within_node)
    assert sorted(grid.ranks) == sorted(train.ranks) and grid.layout == generation
    counted = Counted(src, dest(Grid(generation, train.ranks)), train.ranks)
    assert counted.total(grid.ranks) == sum(lower_bound_numel(src, dest(grid), rank) for rank in train.ranks)
    return grid, counted


def chunkings(layout: Layout, num_layers: int) -> Iterator[tuple[int, tuple[int, ...] | None]]:
    """(vpp, layers of each chunk)."""
    yield from ((vpp, None) for vpp in ((1, 2) if layout.pp > 1 else (1,)) if num_layers % (layout.pp * vpp) == 0)
    if layout.pp == 2:
        yield 1, (1, num_layers - 1)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("train", FOUR, ids=str)
def test_no_order_of_four_ranks_moves_less(train: Layout, model: ModelConfig):
    for vpp, layers in chunkings(train, model.num_layers):
        for generation in FOUR:
            for to_vpp, to_layers in chunkings(generation, model.num_layers):
                grid, counted = solved(Grid.of(train), decoder(model, vpp, layers), generation,
                                       decoder(model, to_vpp, to_layers))
                assert counted.total(grid.ranks) == counted.least()


@pytest.mark.parametrize("train", EIGHT, ids=str)
def test_no_order_of_eight_ranks_moves_less(train: Layout):
    model = tiny_model(num_heads=8, head_dim=2)
    for generation in EIGHT:
        grid, counted = solved(Grid.of(train), decoder(model), generation, decoder(model))
        assert counted.total(grid.ranks) == counted.least()
        assert generation != train or grid == Grid.of(train)


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=str)
@pytest.mark.parametrize("train", FOUR, ids=str)
def test_nodes_come_second(train: Layout, ranks: tuple[int, ...]):
    """Of all orders with the least total none brings less into nodes; also where tensor groups must lie in one."""
    nodes, model = Nodes(2), MODELS["gqa"]
    for generation in FOUR:
        for within in (False, True) if generation.tp <= 2 else (False,):
            grid, counted = solved(Grid(train, ranks), decoder(model), generation, decoder(model), nodes, within)
            orders = [order for order in permutations(ranks) if not within or in_node(order, generation.tp, nodes)]
            assert not within or in_node(grid.ranks, generation.tp, nodes)
            least = min((counted.total(order), counted.far(order, nodes)) for order in orders)
            assert (counted.total(grid.ranks), counted.far(grid.ranks, nodes)) == least, generation


def in_node(order: tuple[int, ...], tp: int, nodes: Nodes) -> bool:
    return all(len({nodes.of(rank) for rank in order[start:start + tp]}) == 1 for start in range(0, len(order), tp))


def least_within(counted: Counted, generation: Layout, nodes: Nodes) -> int:
    """The least total of eight ranks on two nodes of four whose tensor groups lie in a node, by every split of groups.
    """
    places = range(generation.size)
    best = None
    groups = [tuple(places[start:start + generation.tp]) for start in range(0, generation.size, generation.tp)]
    near = [i for i, rank in enumerate(counted.ranks) if nodes.of(rank) == 0]
    for mask in range(1 << len(groups)):
        here = [place for i, group in enumerate(groups) if mask >> i & 1 for place in group]
        if len(here) == len(near):
            there = [place for place in places if place not in here]
            others = [i for i in range(generation.size) if i not in near]
            cost = sum(min(sum(int(counted.received[rank, place]) for rank, place in zip(each, taken))
                           for each in permutations(ranks)) for ranks, taken in ((near, here), (others, there)))
            best = cost if best is None else min(best, cost)
    assert best is not None
    return best


@pytest.mark.parametrize("train", [Layout(1, 4, 2), Layout(2, 4, 1), Layout(4, 2, 1), Layout(2, 1, 4)], ids=str)
def test_pipelined_generation_within_nodes(train: Layout):
    nodes, model = Nodes(4), tiny_model(num_heads=8, head_dim=2)
    for generation in (Layout(2, 2, 2), Layout(2, 4, 1), Layout(4, 2, 1), Layout(1, 2, 4), Layout(4, 1, 2)):
        grid, counted = solved(Grid.of(train), decoder(model), generation, decoder(model), nodes, True)
        assert in_node(grid.ranks, generation.tp, nodes)
        assert counted.total(grid.ranks) == least_within(counted, generation, nodes)


@pytest.mark.parametrize(("train", "generation", "models"), [
    (Layout(4), Layout(2, 1, 2), 1.0), (Layout(8), Layout(4, 1, 2), 1.0), (Layout(8), Layout(2, 1, 4), 3.0),
    (Layout(2, 2), Layout(4), 0.5), (Layout(4, 2), Layout(8), 0.5), (Layout(4, 2), Layout(4, 1, 2), 1.0),
    (Layout(2, 2), Layout(1, 1, 4), 3.0), (Layout(2, 2, 2), Layout(2, 2, 2), 0.0)], ids=str)
def test_models_over_all_wires(train: Layout, generation: Layout, models: float):
    """In units of one model, of the tensors that are cut (norms are on every tensor rank)."""
    def cut_only(grid: Grid) -> ShardMap:
        whole = decoder_shard_map(EVEN, grid, Head.LANGUAGE_MODEL)
        shapes = {name: shape for name, shape in whole.shapes.items() if len(shape) == 2}
        # Embedding and head are on the first and the last stage only, which is no even cut by stages.
        shapes = {name: shape for name, shape in shapes.items() if ".layers." in name}
        return ShardMap(shapes, whole.ranks, lambda rank: [s for s in whole.shards(rank) if s.box.name in shapes],
                        whole.kind_of)

    grid, counted = solved(Grid.of(train), cut_only, generation, cut_only)
    assert counted.total(grid.ranks) / counted.have.shape[1] == models


def test_the_papers_example():
    """Train p-t-d 1-4-2, generate tg 2 on eight ranks: tensor groups at interval two, micro-dp groups of neighbours."""
    grid, _ = solved(Grid.of(Layout(4, 1, 2)), decoder(EVEN), Layout(2, 1, 4), decoder(EVEN))
    assert grid.lines(lambda at: (at.dp,)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    pairs = {frozenset(pair) for line in grid.lines(lambda at: (at.tp,)) for pair in zip(line[::2], line[1::2])}
    assert pairs == {frozenset(pair) for pair in ((0, 1), (2, 3), (4, 5), (6, 7))}


def experts(grid: Grid) -> ShardMap:
    """Eight experts' matrices and a dense one; the data ranks of a tensor rank share the experts out."""
    num_experts = 8
    shapes = {"dense": (8, 6)} | {f"expert.{i}": (4, 6) for i in range(num_experts)}

    def rows(name: str, parts: int, part: int) -> Shard:
        size = shapes[name][0] // parts
        return Shard.of_rows(Box(name, (part * size, 0), ((part + 1) * size, 6)), name)

    def shards(rank: int) -> list[Shard]:
        at, dp = grid.coord(rank), grid.layout.dp
        mine = range(at.dp * num_experts // dp, (at.dp + 1) * num_experts // dp)
        return [rows("dense", grid.layout.tp, at.tp), *(rows(f"expert.{i}", grid.layout.tp, at.tp) for i in mine)]

    return ShardMap(shapes, grid.ranks, shards, lambda rank: (grid.coord(rank).tp, grid.coord(rank).dp))


@pytest.mark.parametrize("train", [Layout(dp=4), Layout(2, 1, 2), Layout(4)], ids=str)
def test_experts(train: Layout):
    for generation in (Layout(dp=4), Layout(2, 1, 2), Layout(4)):
        grid, counted = solved(Grid.of(train), experts, generation, experts)
        assert counted.total(grid.ranks) == counted.least()


def test_ranks_in_any_order_and_ranks_that_have_nothing():
    train = Grid(Layout(2, 2), (7, 4, 5, 6))
    assert solved(train, decoder(EVEN), Layout(2, 2), decoder(EVEN))[0] == train
    half = decoder_shard_map(EVEN, Grid(Layout(2), (4, 5)), Head.LANGUAGE_MODEL)
    grid, counted = solved(train, lambda _: half, Layout(2, 1, 2), decoder(EVEN))
    assert counted.total(grid.ranks) == counted.least()
    assert (grid.coord(4).tp, grid.coord(5).tp) == (0, 1)


def test_what_cannot_be_is_refused():
    source = decoder(EVEN)(Grid.of(Layout(2, 4)))
    with pytest.raises(ValueError, match=r"layout tp2 pp1 dp2 is for 4 ranks, but 8 take part"):
        assign(source, Grid.of(Layout(2, 4)), Layout(2, 1, 2), decoder(EVEN))
    with pytest.raises(ValueError, match=r"tp 8 does not fit into nodes: 4 of node 0's .*use tp 4"):
        assign(source, Grid.of(Layout(2, 4)), Layout(8), decoder(EVEN), nodes=Nodes(4), tp_within_node=True)
    assert assign(source, Grid.of(Layout(2, 4)), Layout(8), decoder(EVEN), nodes=Nodes(4)).layout == Layout(8)


def test_where_there_are_too_many_choices(monkeypatch: pytest.MonkeyPatch):
    """Still fewest bytes where tensor groups are free; where they are not, each still lies in a node."""
    monkeypatch.setattr(assign_block, "MAX_CHOICES", 3)
    nodes, model = Nodes(4), tiny_model(num_heads=8, head_dim=2)
    for train in (Layout(1, 4, 2), Layout(4, 2, 1)):
        for generation in (Layout(2, 4, 1), Layout(2, 2, 2), Layout(8)):
            grid, counted = solved(Grid.of(train), decoder(model), generation, decoder(model), nodes)
            assert counted.total(grid.ranks) == counted.least()
            if generation.tp <= 4:
                grid, counted = solved(Grid.of(train), decoder(model), generation, decoder(model), nodes, True)
                assert in_node(grid.ranks, generation.tp, nodes)
                assert counted.total(grid.ranks) == least_within(counted, generation, nodes)


def test_where_nodes_do_not_fit_the_stages(monkeypatch: pytest.MonkeyPatch):
    """Twelve ranks on nodes of five hang together; in blocks that cut nodes the total is the least all the same."""
    nodes, model = Nodes(5), tiny_model(num_layers=6)
    for limit in (2048, 4):
        monkeypatch.setattr(assign_task, "MAX_BLOCK", limit)
        for train, generation in ((Layout(2, 2, 3), Layout(4, 1, 3)), (Layout(1, 3, 4), Layout(2, 1, 6))):
            grid, counted = solved(Grid.of(train), decoder(model), generation, decoder(model), nodes)
            assert counted.total(grid.ranks) == counted.least()


@pytest.mark.parametrize(("train", "layers", "generation"), [
    (Layout(8, 16, 128), (7, *(8,) * 14, 7), Layout(8, 1, 2048)),
    (Layout(8, 16, 128), (7, *(8,) * 14, 7), Layout(16, 1, 1024)),
    (Layout(8, 9, 4), None, Layout(4, 9, 8)),  # a node takes two groups, of any two stages
], ids=str)
def test_many_ranks_and_layers(train: Layout, layers: tuple[int, ...] | None, generation: Layout):
    """126 layers on up to 16,384 ranks: every rank keeps its tensor part, and groups lie in nodes where they fit."""
    model = tiny_model(num_layers=126, hidden_size=64, num_heads=16, num_kv_heads=8, head_dim=4, vocab_size=64,
                       intermediate_size=96)
    nodes, within = Nodes(8), generation.tp <= 8
    grid = assign(decoder(model, 1, layers)(Grid.of(train)), Grid.of(train), generation, decoder(model), nodes=nodes,
                  tp_within_node=within)
    for rank in grid.ranks:
        before, after = rank % train.tp / train.tp, grid.coord(rank).tp / generation.tp  # where its part starts
        assert before <= after < before + 1 / train.tp or after <= before < after + 1 / generation.tp
    assert not within or in_node(grid.ranks, generation.tp, nodes)
