"""The reshard of a real decoder: bytes at the lower bound, weights bit for bit, stale versions refused."""

from functools import partial

import pytest
import torch

from hybridflow.bench.live_bytes import LiveBytes
from hybridflow.generation.engine import StaleWeightsError
from hybridflow.generation.records import Prompt, SamplingParams
from hybridflow.generation.weight_home import WeightMode
from hybridflow.hybrid_engine import HybridEngine, generation_grid, own_engine
from hybridflow.models.config import Head
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.plan import TransferPlan
from hybridflow.parallel.world import World
from tests.engine.models import tiny_model, train_engine
from tests.ranks import run_ranks

PAIRS = [(Layout(2, 2, 1), Layout(1, 1, 4)), (Layout(4, 1, 1), Layout(2, 1, 2)), (Layout(1, 4, 1), Layout(2, 1, 2)),
         (Layout(2, 1, 2), Layout(4, 1, 1)), (Layout(2, 1, 2), Layout(2, 1, 2)), (Layout(1, 2, 2), Layout(1, 1, 4)),
         (Layout(2, 2, 1), Layout(1, 2, 2)), (Layout(1, 2, 2), Layout(2, 2, 1)), (Layout(4, 1, 1), Layout(1, 4, 1)),
         (Layout(1, 1, 4), Layout(2, 2, 1))]
PARAMS = SamplingParams(max_new_tokens=3)


def reshard(world: World, train: Layout, generation: Layout, tied: bool, bucket_bytes: int) -> tuple[int, int]:
    """(bytes received, their lower bound), after checking every weight against the canonical tensors."""
    model = tiny_model(tie_word_embeddings=tied)
    engine = train_engine(world, train, model, Head.LANGUAGE_MODEL, dtype=torch.float32)
    grid = generation_grid(engine.shard_map, engine.mesh.grid, model, generation)
    hybrid = HybridEngine(engine, Mesh(grid, world), bucket_bytes=bucket_bytes)
    assert sum(param.numel() for param in hybrid.generator.stage.parameters()) == 0
    hybrid.generator.runner.prepare = lambda: None  # weights stay as they came
    hybrid.fill()
    whole = train_engine(World.single(torch.device("cpu")), Layout(), model, Head.LANGUAGE_MODEL, dtype=torch.float32)
    canonical = {shard.box.name: shard.view(whole.storages) for shard in whole.shard_map.shards(0)}
    parameters = hybrid.generator.stage.named_parameters()
    storages = {name: param.data.contiguous() for name, param in parameters}  # shards count rows
    wanted = decoder_shard_map(model, hybrid.mesh.grid, Head.LANGUAGE_MODEL).shards(world.rank)
    assert all(torch.equal(shard.view(storages), canonical[shard.box.name][shard.box.slices]) for shard in wanted)
    hybrid.free()
    assert sum(param.numel() for param in hybrid.generator.stage.parameters()) == 0
    return hybrid.last_report.received_bytes, hybrid.last_report.lower_bound_bytes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("train, generation", PAIRS, ids=str)
def test_received_bytes_are_the_lower_bound(train: Layout, generation: Layout, tied: bool):
    results = run_ranks(4, reshard, train, generation, tied, 1 << 20)
    assert all(received == bound for received, bound in results)
    # each generation shard in a training shard
    is_inside = generation.pp % train.pp == 0 and generation.tp % train.tp == 0
    assert (sum(received for received, _ in results) == 0) is is_inside
    assert results == run_ranks(4, reshard, train, generation, tied, 300)  # buckets smaller than most tensors


@pytest.mark.parametrize("t, p, tg", [(2, 2, 1), (4, 1, 2), (4, 2, 2), (8, 1, 2), (8, 4, 1), (8, 1, 4)])
def test_volume_is_the_papers_where_its_grouping_applies(t: int, p: int, tg: int):
    """HybridFlow, table 2: (t p - tg) / (tg t p) of the model for each rank, of the tensors that are cut."""
    model = tiny_model(num_layers=8, num_heads=8, num_kv_heads=8, vocab_size=64)
    train = Grid.of(Layout(t, p, 1))
    source = decoder_shard_map(model, train, Head.LANGUAGE_MODEL)
    grid = generation_grid(source, train, model, Layout(tg, 1, t * p // tg))
    dest = decoder_shard_map(model, grid, Head.LANGUAGE_MODEL)
    cut = {name for name, shape in source.shapes.items() if len(shape) == 2}
    size = sum(shape[0] * shape[1] for name, shape in source.shapes.items() if name in cut)
    plan = TransferPlan(source, dest)
    received = sum(c.box.numel for c in plan.copies if c.source != c.dest and c.box.name in cut)
    assert received == (t * p - tg) * size // tg


def test_generation_groups_are_those_of_the_papers_example():
    """Train p-t-d 1-4-2, generate tg 2 on eight ranks: tensor groups at interval two, micro-dp groups of neighbours."""
    train, model = Grid.of(Layout(4, 1, 2)), tiny_model(num_kv_heads=4, vocab_size=64)
    grid = generation_grid(decoder_shard_map(model, train, Head.LANGUAGE_MODEL), train, model, Layout(2, 1, 4))
    assert grid.lines(lambda at: (at.dp,)) == [(0, 2), (1, 3), (4, 6), (5, 7)]


def construction(world: World, weights: WeightMode) -> tuple[int, int]:
    """The most bytes alive at once of all that is made for an engine, and those of its generation shard."""
    model = tiny_model(hidden_size=64, intermediate_size=96)
    engine = train_engine(world, Layout(2, 2, 1), model, Head.LANGUAGE_MODEL, dtype=torch.float32)
    mesh = Mesh(generation_grid(engine.shard_map, engine.mesh.grid, model, Layout(2, 1, 2)), world)
    with LiveBytes() as live:
        hybrid = HybridEngine(engine, mesh, partial(own_engine, weights=weights), bucket_bytes=1 << 20)
    assert all(param.device == mesh.device and not param.requires_grad for param in hybrid.generator.stage.parameters())
    wanted = decoder_shard_map(model, mesh.grid, Head.LANGUAGE_MODEL).shards(world.rank)
    return live.peak, sum(shard.box.numel for shard in wanted) * torch.float32.itemsize


@pytest.mark.parametrize("weights", WeightMode)
def test_an_engine_that_has_no_weights_yet_takes_no_memory(weights: WeightMode):
    for peak, shard in run_ranks(4, construction, weights):
        assert peak < shard / 100  # numbers that ranks agree on


GENERATED = [Prompt(i, 0, tuple(range(1, 4 + 5 * i))) for i in range(3)]


def generated(world: World, train: Layout, generation: Layout, tied: bool, weights: WeightMode) -> list:
    engine = train_engine(world, train, tiny_model(tie_word_embeddings=tied), Head.LANGUAGE_MODEL)
    grid = generation_grid(engine.shard_map, engine.mesh.grid, engine.model, generation)
    hybrid = HybridEngine(engine, Mesh(grid, world), partial(own_engine, weights=weights), bucket_bytes=1 << 20)
    hybrid.fill()
    return hybrid.generator.generate(GENERATED, SamplingParams(max_new_tokens=6), 0, expected_version=engine.version)


@pytest.mark.parametrize("weights", WeightMode)
@pytest.mark.parametrize("tied", [False, True])
def test_every_rank_generates_what_one_process_would(tied: bool, weights: WeightMode):
    want = generated(World.single(torch.device("cpu")), Layout(), Layout(), tied, weights)
    for train, generation in (Layout(2, 2, 1), Layout(1, 2, 2)), (Layout(4, 1, 1), Layout(1, 4, 1)), \
            (Layout(1, 2, 2), Layout(2, 2, 1)):
        for completions in run_ranks(4, generated, train, generation, tied, weights):
            for found, wanted in zip(completions, want, strict=True):
                assert found.response_ids == wanted.response_ids
                assert found.log_probs == pytest.approx(wanted.log_probs, rel=0, abs=1e-10)


def stale(world: World) -> str:
    engine = train_engine(world, Layout(2, 2, 1), tiny_model(), Head.LANGUAGE_MODEL)
    hybrid = HybridEngine(engine, Mesh(Grid.of(Layout(1, 1, 4)), world), bucket_bytes=1 << 20)
    hybrid.fill()
    prompts = [Prompt(0, 0, (1, 2))]
    before = hybrid.generator.generate(prompts, PARAMS, 0, expected_version=engine.version)
    engine.version += 1
    with pytest.raises(StaleWeightsError, match="version 1"):
        hybrid.generator.generate(prompts, PARAMS, 0, expected_version=engine.version)
    hybrid.free()
    with pytest.raises(StaleWeightsError):
        hybrid.generator.generate(prompts, PARAMS, 0, expected_version=engine.version)
    return str(before)


def test_stale_weights_do_not_generate():
    assert len(set(run_ranks(4, stale))) == 1
