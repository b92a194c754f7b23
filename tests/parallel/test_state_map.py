"""Optimizer state as boxes: the geometry by brute force, and state moved between layouts by a plan."""

import pytest
import torch

from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.gradients import MainGrads
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.optimizer import AdamWSettings, LrSchedule, ShardedAdamW
from hybridflow.parallel.plan import TransferPlan
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.state_map import FlatPlace, StateKind, gather_layouts, state_map
from hybridflow.parallel.transfer import execute
from hybridflow.parallel.world import World
from tests.parallel.toy_replica import MICRO_BATCHES, SHAPES, ToyStage, toy_shard_map
from tests.ranks import run_ranks

SETTINGS = AdamWSettings(weight_decay=0.1, clip_grad_norm=2.0)
LR = LrSchedule(peak=0.05)
WEIGHTS = {  # canonical shape, the shard's box, and the shard's offset and strides in a parameter of its own size
    "matrix": ((6, 5), Shard.of_rows(Box("matrix", (0, 0), (6, 5)), "w")),
    "second half of a fused one": ((6, 5), Shard.of_rows(Box("m", (2, 0), (6, 5)), "w", 3)),
    "columns": ((6, 8), Shard.of_rows(Box("columns", (0, 4), (6, 8)), "w")),
    "columns of a wider one": ((6, 8), Shard(Box("wide", (0, 4), (6, 8)), "w", 3, (9, 1))),
    "vector": ((7,), Shard.of_rows(Box("vector", (2,), (6,)), "w")),
    "cube": ((3, 4, 5), Shard.of_rows(Box("cube", (0, 1, 0), (3, 3, 5)), "w")),
    "one row": ((1, 5), Shard.of_rows(Box("row", (0, 0), (1, 5)), "w")),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_every_range_is_covered_by_few_boxes(case: str) -> None:
    """For each range [start, end) of a share that the parameter begins at element 4 of."""
    shape, weight = WEIGHTS[case]
    name, first = weight.box.name, 4
    size = first + weight.offset + sum((n - 1) * s for n, s in zip(weight.box.shape, weight.strides)) + 1
    where = torch.full(shape, -1)  # of each element of the weight in the bucket
    flat = {"w": torch.arange(first, size)}
    where[weight.box.slices] = weight.view(flat)
    weights = ShardMap({name: shape}, (0,), lambda rank: [weight])
    for start in range(size):
        for end in range(start + 1, size + 1):
            layout = {0: {"w": FlatPlace(7, first, start, end)}}
            shards = state_map(weights, layout, [StateKind.EXP_AVG]).shards(0)
            found = torch.full(shape, -1)
            for shard in shards:
                assert (shard.box.name, shard.storage) == (f"exp_avg/{name}", "exp_avg.7")
                assert (found[shard.box.slices] == -1).all()
                found[shard.box.slices] = shard.view({"exp_avg.7": torch.arange(start, end)})
            assert torch.equal(found, torch.where((where >= start) & (where < end), where, -1))
            assert len(shards) <= 2 * len(shape) - 1


def made(mesh: Mesh, zero_stage: int, bucket_bytes: int | None, offload: bool = False) -> tuple[ToyStage, ShardedAdamW]:
    stage = ToyStage(mesh, torch.float64)
    main = MainGrads(stage, stage.syncs(), mesh.data, zero_stage, bucket_bytes=bucket_bytes)
    return stage, ShardedAdamW(main, mesh.model, SETTINGS, LR, offload=offload)


def train(stage: ToyStage, optimizer: ShardedAdamW, steps: range) -> None:
    for step in steps:
        for micro_batch in range(MICRO_BATCHES):
            stage.loss(step, micro_batch).backward()
        optimizer.grads.reduce()
        optimizer.step()
        optimizer.zero_grad()


CASES = [(Layout(tp=2, dp=2), 1, None, False), (Layout(tp=2, dp=2), 2, 200, True), (Layout(dp=4), 1, 1, False),
         (Layout(pp=2, dp=2), 2, None, False), (Layout(pp=4), 0, None, True)]


def moved_and_continued(world: World) -> None:
    """State goes through every layout in turn, two steps in each, with noise in everything but what was moved."""
    stage = optimizer = there = None
    for number, (layout, zero_stage, bucket_bytes, offload) in enumerate(CASES * 2):
        mesh = Mesh(Grid.of(layout), world)
        here_stage, here = made(mesh, zero_stage, bucket_bytes, offload)
        state = here.state_map(toy_shard_map(mesh.grid), world)
        if optimizer is not None:
            for tensor in here.storages().values():
                tensor.fill_(float("nan"))
            plan = TransferPlan(there, state)
            execute(plan, world, optimizer.storages(), here.storages(), wire_dtype=torch.float64, bucket_bytes=1000)
            here.publish()
            here.restore(optimizer.counters)
            for bucket, share in zip(here.grads.buckets, here.shares, strict=True):
                gaps = torch.ones(bucket.size, dtype=torch.bool)  # the alignment belongs to nobody
                for slot in bucket.slots:
                    gaps[slot.start : slot.end] = False
                for kind in (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ):
                    share.tensor(kind)[gaps[bucket.start : bucket.end]] = 0
        stage, optimizer, there = here_stage, here, state
        same_losses(stage)
        train(stage, optimizer, range(2 * number, 2 * number + 2))
    check_against_one_process(world, stage, optimizer, there, 2 * len(CASES) * 2)


def same_losses(stage: ToyStage) -> None:
    """Make the loss of every layout the same: what data rank 0 and part 0 have, divided among all who contribute."""
    mesh = stage.mesh
    def loss(step: int, micro_batch: int) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for name, param in stage.named_parameters():
            shared = {"norm": mesh.tp.size, "tied": mesh.embedding.size}.get(name, 1) * mesh.data.size
            c = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(step * 10 + micro_batch),
                            dtype=torch.float64)
            total = total + 0.5 * (stage.local(name, c) * (param - 1).square()).sum() / shared
        return total

    stage.loss = loss


def check_against_one_process(world: World, stage: ToyStage, optimizer: ShardedAdamW, there: ShardMap,
                              steps: int) -> None:
    alone = World.single(torch.device("cpu"))
    whole, reference = made(Mesh(Grid.of(Layout()), alone), 0, None)
    same_losses(whole)
    train(whole, reference, range(steps))
    weights = toy_shard_map(Grid.of(Layout()))
    one = state_map(weights, {0: reference.grads.layout()})
    got = {name: torch.zeros_like(tensor) for name, tensor in reference.storages().items()}
    execute(TransferPlan(there, one), world, optimizer.storages(), got, wire_dtype=torch.float64)
    if world.rank == 0:
        for name, tensor in reference.storages().items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-11, atol=1e-11, msg=name)


def test_state_moves_between_layouts_and_training_goes_on_as_in_one_process() -> None:
    run_ranks(4, moved_and_continued)


def gradients_too(world: World) -> None:
    """The shares of gradients have boxes as well: gathered from ZeRO-2 they are those of ZeRO-0."""
    mesh = Mesh(Grid.of(Layout(tp=2, dp=2)), world)
    weights, maps, grads = toy_shard_map(mesh.grid), [], []
    for zero_stage in (0, 2):
        stage, optimizer = made(mesh, zero_stage, 300)
        stage.loss(0, 0).backward()
        optimizer.grads.reduce()
        layouts = gather_layouts(optimizer.grads.layout(), world)
        maps.append(state_map(weights, layouts, [StateKind.MAIN_GRAD]))
        grads.append(optimizer.grads.storages())
    got = {name: torch.zeros_like(tensor) for name, tensor in grads[0].items()}
    execute(TransferPlan(maps[1], maps[0]), world, grads[1], got, wire_dtype=torch.float64)
    assert all(torch.equal(got[name], tensor) for name, tensor in grads[0].items())


def test_gradient_shares_have_boxes() -> None:
    run_ranks(4, gradients_too)
