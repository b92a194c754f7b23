"""Main gradients against the whole model: sums over micro-batches, replicas and copies, every stage, cut and hook."""


import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from hybridflow.parallel import collectives
from hybridflow.parallel.collectives import Pending
from hybridflow.parallel.comm_hook import Compressed, DdpHook, GradBucket, plain
from hybridflow.parallel.gradients import GradSync, MainGrads
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.world import World
from tests.parallel.toy_replica import MICRO_BATCHES, ToyStage, ToyWhole
from tests.ranks import run_ranks

CPU = torch.device("cpu")
LAYOUTS = (Layout(tp=2, dp=2), Layout(pp=2, dp=2), Layout(tp=2, pp=2), Layout(dp=4), Layout(pp=4), Layout(dp=2, cp=2))


def accumulate(stage: ToyStage, main: MainGrads, step: int, num_micro_batches: int, overlap: bool) -> None:
    """The backwards of a step and their reduction, as an executor of schedules asks for them."""
    every = tuple(range(len(main.buckets)))
    for micro_batch in range(num_micro_batches):
        if overlap and micro_batch == num_micro_batches - 1:
            main.arm(every)
        stage.loss(step, micro_batch).backward()
        assert all(param.grad is None for param in stage.parameters())
    if not overlap:
        main.reduce()
        return
    for bucket in every:
        main.start(bucket)
    main.finish()


def differs(stage: ToyStage, main: MainGrads, whole: ToyWhole) -> float:
    """The largest difference of this rank's reduced gradients from those of the whole model."""
    largest = 0.0
    for bucket in main.buckets:
        for slot in bucket.slots:
            want = torch.full((bucket.size,), float("nan"), dtype=torch.float64)
            want[slot.start : slot.end] = stage.local(slot.name, getattr(whole, slot.name).grad).flatten()
            mine = slice(max(slot.start, bucket.start), max(slot.start, bucket.start, min(slot.end, bucket.end)))
            got = bucket.share[mine.start - bucket.start : mine.stop - bucket.start]
            largest = max([largest, *(got - want[mine]).abs().tolist()])
    return largest


def reduced(world: World, layout: Layout, zero_stage: int, dtype: torch.dtype = torch.float64, tolerance: float = 1e-12,
            num_micro_batches: int = MICRO_BATCHES, overlap: bool = True, order: tuple[int, ...] | None = None,
            **options: object) -> None:
    mesh = Mesh(Grid.of(layout) if order is None else Grid(layout, order), world)
    stage, whole = ToyStage(mesh, dtype), ToyWhole()
    main = MainGrads(stage, stage.syncs(), mesh.data, zero_stage, **options)
    for step in range(2):  # the second one must not see the first
        accumulate(stage, main, step, num_micro_batches, overlap)
        whole.backward(step, layout, num_micro_batches)
        assert all(bucket.share.dtype == torch.promote_types(dtype, torch.float32) for bucket in main.buckets)
        worst = differs(stage, main, whole)
        assert worst <= tolerance, (layout, zero_stage, options, worst)
        assert main.num_reductions == (step + 1) * len(main.buckets) * (mesh.data.size > 1)
        main.zero()


def halved_and_doubled(bucket: GradBucket) -> Pending:
    """A hook made of others: works on the buffer, and on the result when it is there."""
    bucket.grads.mul_(0.5)
    return plain(bucket).then(lambda share: share * 2)


def all_layouts(world: World) -> None:
    for layout in LAYOUTS if world.size == 4 else (Layout(dp=2), Layout(pp=2), Layout(tp=2), Layout(cp=2)):
        for zero_stage in (0, 1, 2):
            for bucket_bytes, num_micro_batches in ((None, 1), (1, 3), (400, 3)):
                reduced(world, layout, zero_stage, bucket_bytes=bucket_bytes, num_micro_batches=num_micro_batches)
            reduced(world, layout, zero_stage, overlap=False, chunk_of=lambda name: "tbcn".index(name[0]))
    data = Layout(dp=world.size)
    for zero_stage in (0, 1, 2):
        reduced(world, data, zero_stage, torch.bfloat16, 0.3, bucket_bytes=200)
        reduced(world, data, zero_stage, hook=halved_and_doubled)
        everyone = world.group(tuple(range(world.size)))
        reduced(world, data, zero_stage, hook=DdpHook(default_hooks.allreduce_hook, everyone))
        reduced(world, data, zero_stage, tolerance=0.2, hook=DdpHook(default_hooks.bf16_compress_hook, everyone))
        reduced(world, data, zero_stage, tolerance=0.2, reduce_dtype=torch.bfloat16)
        reduced(world, data, zero_stage, order=tuple(reversed(range(world.size))))
    collectives.PIECE, before = world.size * 7, collectives.PIECE  # 7 elements of each rank at a time
    for zero_stage in (1, 2):
        reduced(world, data, zero_stage)
    collectives.PIECE = before


def faulty(world: World, hook: object) -> bool:
    """Whether the comparison above sees what `hook` does wrong."""
    try:
        reduced(world, Layout(dp=2), 1, hook=hook)
    except AssertionError:
        return True
    return False


def twice(bucket: GradBucket) -> Pending:
    plain(GradBucket(bucket.index, bucket.grads, torch.empty_like(bucket.share), bucket.group, bucket.sharded)).wait()
    return plain(bucket).then(lambda share: share * 2)


def mean(bucket: GradBucket) -> Pending:
    return plain(bucket).then(lambda share: share / bucket.group.size)


def neighbour(bucket: GradBucket) -> Pending:
    return plain(bucket).then(lambda share: share.roll(1))


def test_one_rank() -> None:
    for zero_stage in (0, 1, 2):
        reduced(World.single(CPU), Layout(), zero_stage, bucket_bytes=200)


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_are_those_of_the_whole_model(ranks: int) -> None:
    run_ranks(ranks, all_layouts)


@pytest.mark.parametrize("hook", [twice, mean, neighbour])
def test_a_planted_fault_is_seen(hook: object) -> None:
    assert all(run_ranks(2, faulty, hook))


def test_buckets_keep_chunks_kinds_and_size_apart() -> None:
    mesh = Mesh(Grid.of(Layout()), World.single(CPU))
    module = nn.Module()
    shapes = {"embed": (8, 4), "first": (4, 4), "norm": (4,), "second": (4, 4), "third": (4, 4), "value": (1, 4)}
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    main = MainGrads(module, {}, mesh.data, chunk_of=lambda name: 5 if name in ("third", "value") else 2,
                     bucket_bytes=128)
    names = [[slot.name for slot in bucket.slots] for bucket in main.buckets]
    assert names == [["value"], ["third"], ["norm"], ["second", "first"], ["embed"]]  # embed alone has 128 bytes
    assert main.bucket_chunks == (5, 5, 2, 2, 2)
    tiny = MainGrads(module, {}, mesh.data, bucket_bytes=1)
    assert [bucket.slots[0].name for bucket in tiny.buckets] == list(reversed(shapes))


def test_parameters_become_views_and_keep_their_values() -> None:
    mesh = Mesh(Grid.of(Layout()), World.single(CPU))
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 3, bias=False))
    module[1].bias.requires_grad_(False)
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    main = MainGrads(module, {}, mesh.data)
    for name, param in module.named_parameters():
        assert torch.equal(param, before[name])
    assert [[slot.name for slot in bucket.slots] for bucket in main.buckets] == [
        ["1.weight", "0.bias"], ["2.weight", "0.weight"]]  # completed by 0.bias before 0.weight
    assert [bucket.decay for bucket in main.buckets] == [False, True]
    main.buckets[1].params.fill_(7.0)
    assert (module[2].weight == 7.0).all()


def test_a_weight_used_twice_is_one_parameter() -> None:
    mesh = Mesh(Grid.of(Layout()), World.single(CPU))
    module = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    module["head"].weight = module["embed"].weight
    main = MainGrads(module, {}, mesh.data)
    module["head"](module["embed"](torch.tensor([1, 2]))).sum().backward()
    weight = module["embed"].weight
    assert weight.data_ptr() == module["head"].weight.data_ptr() == main.buckets[0].params.data_ptr()
    want = weight[1] + weight[2]  # d/dW of sum over (i, v) of W[i] . W[v], as head
    want = want.expand(4, 3).clone()
    want[[1, 2]] += weight.sum(0)  # and as embedding
    torch.testing.assert_close(main.buckets[0].grads[:12].view(4, 3), want.detach())


def test_counted_ranges_merge_neighbours_and_stay_in_the_share() -> None:
    mesh = Mesh(Grid.of(Layout()), World.single(CPU))
    module = nn.Module()
    for name in "dcba":
        module.register_parameter(name, nn.Parameter(torch.zeros(40)))
    bucket = MainGrads(module, {"c": GradSync(counted=False)}, mesh.data).buckets[0]
    assert bucket.counted_ranges() == [(0, 104), (192, 232)]  # slots start at 0, 64, 128, 192
    bucket.start, bucket.end = 70, 200
    assert bucket.counted_ranges() == [(0, 34), (122, 130)]


def test_faults() -> None:
    mesh = Mesh(Grid.of(Layout()), World.single(CPU))
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="zero_stage 3 must be 0"):
        MainGrads(module, {}, mesh.data, 3)
    with pytest.raises(ValueError, match=r"name no parameter of the stage: \['wieght'\]"):
        MainGrads(module, {"wieght": GradSync()}, mesh.data)
    with pytest.raises(ValueError, match="bucket_bytes 0 must be at least 1"):
        MainGrads(module, {}, mesh.data, bucket_bytes=0)
    with pytest.raises(ValueError, match="give it or a reduce_dtype"):
        MainGrads(module, {}, mesh.data, hook=Compressed(), reduce_dtype=torch.bfloat16)
    main = MainGrads(module, {}, mesh.data)
    with pytest.raises(AssertionError, match=r"buckets \[0, 1\] were never started"):
        main.finish()
    main.reduce()
    with pytest.raises(AssertionError, match="once a step"):
        main.reduce()
