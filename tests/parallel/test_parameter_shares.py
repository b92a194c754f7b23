"""Shares of the parameters as a source: sent on after a step without an all-gather, they make the same weights."""

import math
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from hybridflow.models.config import Family, Head, ModelConfig
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel.arithmetic import ceil_div
from hybridflow.parallel.gradients import MainGrads
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.nodes import ONE_NODE, Nodes
from hybridflow.parallel.optimizer import AdamWSettings, LrSchedule, ShardedAdamW
from hybridflow.parallel.parameter_shares import divided_map, share_map, share_storage
from hybridflow.parallel.plan import Copy, TransferPlan, lower_bound_numel
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.share import with_training
from hybridflow.parallel.state_map import FlatLayout, FlatPlace
from hybridflow.parallel.transfer import execute
from hybridflow.parallel.world import World
from tests.parallel.toy_replica import MICRO_BATCHES, SHAPES, ToyStage, toy_shard_map
from tests.ranks import run_ranks

SETTINGS = AdamWSettings(weight_decay=0.1, clip_grad_norm=2.0)
LAYOUTS = (Layout(tp=2, dp=2), Layout(pp=2, dp=2), Layout(dp=4), Layout(dp=2, cp=2), Layout(tp=2, pp=2))


def made(mesh: Mesh, dtype: torch.dtype, zero_stage: int, offload: bool) -> tuple[ToyStage, ShardedAdamW]:
    stage = ToyStage(mesh, dtype)
    main = MainGrads(stage, stage.syncs(), mesh.data, zero_stage, bucket_bytes=300)
    return stage, ShardedAdamW(main, mesh.model, SETTINGS, LrSchedule(0.05), offload=offload)


def add_up(stage: ToyStage, optimizer: ShardedAdamW, step: int, spoilt: bool) -> None:
    optimizer.zero_grad()
    for micro_batch in range(MICRO_BATCHES):
        (stage.loss(step, micro_batch) * (math.nan if spoilt else 1.0)).backward()
    optimizer.grads.reduce()


def shares_make_the_gathered_weights(world: World, layout: Layout, zero_stage: int, dtype: torch.dtype,
                                     offload: bool) -> int:
    """Three steps, the second of which is skipped; buckets step in any order, and what is sent is the bound."""
    mesh = Mesh(Grid.of(layout), world)
    stage, optimizer = made(mesh, dtype, zero_stage, offload)
    gathered, reference = made(mesh, dtype, zero_stage, offload)
    weights = toy_shard_map(mesh.grid)
    source = share_map(weights, optimizer.grads.layout(), mesh, optimizer.grads.sharded)
    plan = TransferPlan(source, weights)
    received = 0
    for step in range(3):
        add_up(stage, optimizer, step, spoilt=step == 1)
        add_up(gathered, reference, step, spoilt=step == 1)
        info = optimizer.begin()
        assert repr(info) == repr(reference.step()) and info.skipped is (step == 1)  # a norm of NaN equals nothing
        places = range(len(optimizer.shares))
        assert optimizer.waiting == (frozenset() if info.skipped else frozenset(places))
        for bucket in [*reversed(places), *places]:
            optimizer.step_bucket(bucket)
        storages = {name: param.data for name, param in stage.named_parameters()}
        shares = {share_storage(i): bucket.my_params for i, bucket in enumerate(optimizer.grads.buckets)}
        received += execute(plan, world, shares, storages, wire_dtype=dtype, bucket_bytes=200).received_bytes
        for name, param in gathered.named_parameters():
            assert torch.equal(storages[name], param), (layout, zero_stage, name)
        for name, state in reference.storages().items():
            assert torch.equal(optimizer.storages()[name], state), name
    return received


def four_ranks(world: World) -> None:
    for layout in LAYOUTS:
        for zero_stage, dtype, offload in ((1, torch.float32, False), (2, torch.bfloat16, False),
                                           (1, torch.bfloat16, True), (0, torch.float32, True)):
            received = shares_make_the_gathered_weights(world, layout, zero_stage, dtype, offload)
            assert (received > 0) is (zero_stage > 0 and layout.dp > 1)


def test_shares_make_the_gathered_weights_bit_for_bit() -> None:
    run_ranks(4, four_ranks)


def every_share_is_described(world: World) -> None:
    """What a rank works out for the others is what they have, at less metadata than a layout of every rank."""
    for layout in LAYOUTS:
        mesh = Mesh(Grid.of(layout), world)
        _, optimizer = made(mesh, torch.float32, 1, offload=False)
        weights = toy_shard_map(mesh.grid)
        source = share_map(weights, optimizer.grads.layout(), mesh, optimizer.grads.sharded)
        assert len(source.kinds) == world.size
        cover = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for rank in range(world.size):
            for shard in source.shards(rank):
                cover[shard.box.name][shard.box.slices] += 1
        copies = {"cut": 1, "tied": min(layout.pp, 2) * layout.tp, "norm": layout.tp, "bias": layout.tp}
        assert all((cover[name] == count).all() for name, count in copies.items()), layout
        sizes = {share_storage(i): b.my_params.numel() for i, b in enumerate(optimizer.grads.buckets)}
        for shard in source.shards(world.rank):
            last = shard.offset + sum((n - 1) * s for n, s in zip(shard.box.shape, shard.strides, strict=True))
            assert 0 <= shard.offset <= last < sizes[shard.storage]


def test_every_element_is_in_one_share() -> None:
    run_ranks(4, every_share_is_described)


def test_frozen_parameters_stay_where_they_are() -> None:
    mesh = Mesh(Grid.of(Layout()), World.single(torch.device("cpu")))
    stage = ToyStage(mesh, torch.float32)
    stage.norm.requires_grad_(False)
    main = MainGrads(stage, {}, mesh.data, 1)
    shards = share_map(toy_shard_map(mesh.grid), main.layout(), mesh, main.sharded).shards(0)
    assert {shard.storage for shard in shards if shard.box.name == "norm"} == {"norm"}
    assert {shard.storage for shard in shards if shard.box.name != "norm"} <= {share_storage(i) for i in range(4)}


def flat_layout(weights: ShardMap, rank: int, num_shares: int) -> FlatLayout:
    """Three parameters to a bucket, last ones first; shares end anywhere, and the final norm is frozen."""
    sizes: Counter[str] = Counter()
    for shard in weights.shards(rank):
        sizes[shard.storage] += shard.box.numel
    names = [name for name in reversed(sizes) if name != "norm.weight"]
    layout = {}
    for bucket, start in enumerate(range(0, len(names), 3)):
        ends = list(accumulate(sizes[name] for name in names[start : start + 3]))
        for name, first in zip(names[start : start + 3], [0, *ends]):
            layout[name] = FlatPlace(bucket, first, 0, ceil_div(ends[-1], num_shares))
    return layout


def by_wire(plan: TransferPlan, rank: int) -> dict[tuple[int, int, int], list[Copy]]:
    wires: dict[tuple[int, int, int], list[Copy]] = defaultdict(list)
    for copy in plan.of_rank(rank):
        wires[copy.source, copy.dest, copy.hop].append(copy)
    return wires


@pytest.mark.parametrize(("tied", "sharded", "generation", "nodes"), [
    (False, True, Layout(tp=4, dp=6), Nodes(4)), (True, True, Layout(tp=1, dp=24), Nodes(8)),
    (True, True, Layout(tp=2, dp=12), ONE_NODE), (True, False, Layout(tp=4, dp=6), Nodes(4)),
])
def test_a_plan_of_divided_parameters_is_that_of_all_shares(tied: bool, sharded: bool, generation: Layout,
                                                            nodes: Nodes) -> None:
    model = ModelConfig(Family.LLAMA, 52, 16, 24, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=4,
                        tie_word_embeddings=tied)
    grid = Grid.of(Layout(tp=2, pp=2, dp=3, cp=2))
    weights = decoder_shard_map(model, grid, Head.LANGUAGE_MODEL)
    wanted = with_training(decoder_shard_map(model, Grid.of(generation), Head.LANGUAGE_MODEL), weights)
    layouts = {kind: flat_layout(weights, ranks[0], 6 if sharded else 1) for kind, ranks in weights.kinds.items()}
    shares = divided_map(weights, layouts, grid, sharded)
    plan = TransferPlan(shares, wanted, nodes)
    plain = TransferPlan(replace(shares, division=None), wanted, nodes)
    for rank in grid.ranks:
        assert by_wire(plan, rank) == by_wire(plain, rank)
        assert plan.received_numel(rank) == lower_bound_numel(shares, wanted, rank)


def test_gradients_are_kept_until_every_bucket_has_stepped() -> None:
    mesh = Mesh(Grid.of(Layout()), World.single(torch.device("cpu")))
    stage, optimizer = made(mesh, torch.float32, 0, offload=False)
    add_up(stage, optimizer, 0, spoilt=False)
    optimizer.begin()
    optimizer.step_bucket(0)
    with pytest.raises(AssertionError, match="have not stepped"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="have not taken the step"):
        optimizer.begin()
