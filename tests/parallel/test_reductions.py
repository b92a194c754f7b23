"""When a bucket is reduced, what travels, what is held, and how hooks take part."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import nn

from hybridflow.parallel.collectives import Pending
from hybridflow.parallel.comm_hook import GradBucket, plain
from hybridflow.parallel.gradients import MAX_IN_FLIGHT, MainGrads
from hybridflow.parallel.linear import ColumnParallelLinear, RowParallelLinear
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.weight_grads import WeightGrads
from hybridflow.parallel.world import World
from tests.parallel.test_gradients import accumulate
from tests.parallel.toy_replica import ToyStage
from tests.ranks import run_ranks

CPU = torch.device("cpu")
LAYOUTS = (Layout(tp=2, dp=2), Layout(pp=2, dp=2), Layout(tp=2, pp=2), Layout(dp=4), Layout(pp=4), Layout(dp=2, cp=2))


class Stack(nn.Module):
    """Four square matrices in a row, each with a norm-like scale: `layers.0.weight` `[8, 8]` and so on."""

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=torch.float64) for _ in range(depth))
        for i, layer in enumerate(self.layers):
            layer.weight.data.copy_(torch.randn(width, width, generator=torch.Generator().manual_seed(i)))

    def forward(self, x: torch.Tensor, layers: Sequence[int] | None = None) -> torch.Tensor:
        for i in range(len(self.layers)) if layers is None else layers:
            x = self.layers[i](x).tanh()
        return x.sum()


MATRIX = 8 * 8 * 8  # bytes of one


class Recorder:
    """A hook that notes what it sees when it is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool, int]] = []  # bucket, inside a backward, gradient bytes held
        self.main: MainGrads | None = None
        self.in_backward = False

    def __call__(self, bucket: GradBucket) -> Pending:
        held = sum(bucket.grad_nbytes for bucket in self.main.buckets)
        self.calls.append((bucket.index, self.in_backward, held))
        return plain(bucket)

    def backward(self, loss: torch.Tensor) -> None:
        self.in_backward = True
        loss.backward()
        self.in_backward = False


def recorded(world: World, depth: int, **options: object) -> tuple[Stack, Recorder]:
    mesh = Mesh(Grid.of(Layout(dp=world.size)), world)
    module, recorder = Stack(depth=depth), Recorder()
    recorder.main = MainGrads(module, {}, mesh.data, hook=recorder, **options)
    return module, recorder


def starts_inside_the_last_backward(world: World) -> None:
    module, recorder = recorded(world, 4, bucket_bytes=MATRIX)
    main, x = recorder.main, torch.ones(2, 8, dtype=torch.float64)
    assert [bucket.slots[0].name for bucket in main.buckets] == [f"layers.{i}.weight" for i in (3, 2, 1, 0)]
    recorder.backward(module(x))
    assert recorder.calls == []  # nothing is armed
    main.arm((0, 1, 2, 3))
    recorder.backward(module(x))
    assert [call[:2] for call in recorder.calls] == [(i, True) for i in range(4)]
    for bucket in range(4):
        main.start(bucket)
    main.finish()
    assert len(recorder.calls) == 4
    main.zero()

    recorder.calls.clear()  # rank 1 has no gradient for layer 2: its bucket 1 and what follows wait to be forced
    main.arm((0, 1, 2, 3))
    recorder.backward(module(x, (0, 1, 3) if world.rank == 1 else None))
    inside = 1 if world.rank == 1 else 4
    main.start(2)
    assert [call[:2] for call in recorder.calls][:3] == [(i, i < inside) for i in range(3)]
    main.start(3)
    main.finish()
    got = torch.stack([bucket.share for bucket in main.buckets])
    want = torch.zeros_like(got)
    for layers in ((0, 1, 2, 3), (0, 1, 3)):
        grads = torch.autograd.grad(module(x, layers), list(module.parameters()), materialize_grads=True)
        want += torch.stack([grad.flatten() for grad in reversed(grads)])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    with pytest.raises(AssertionError, match=r"layers.3.weight got a gradient after its bucket 0"):
        module(x).backward()


def test_a_reduction_starts_inside_the_backward_that_completes_its_bucket_and_in_order() -> None:
    run_ranks(2, starts_inside_the_last_backward)


def zero_2_memory(world: World) -> None:
    depth = 12
    module, recorder = recorded(world, depth, bucket_bytes=MATRIX, zero_stage=2)
    main, x = recorder.main, torch.ones(2, 8, dtype=torch.float64)
    shares = depth * MATRIX // world.size
    for _ in range(2):
        assert sum(bucket.grad_nbytes for bucket in main.buckets) == shares
        main.arm(tuple(range(depth)))
        recorder.backward(module(x))
        # One that is being filled, and those on their way.
        assert max(held for *_, held in recorder.calls) <= shares + (1 + MAX_IN_FLIGHT) * MATRIX
        main.reduce()
        assert sum(bucket.grad_nbytes for bucket in main.buckets) == shares
        with pytest.raises(AssertionError, match="only the share is kept"):
            _ = main.buckets[0].grads
        main.zero()
    recorder.backward(module(x))  # not armed: full gradients stay for the micro-batches to come
    assert sum(bucket.grad_nbytes for bucket in main.buckets) == shares + depth * MATRIX
    main.zero()


def test_zero_2_holds_shares_and_a_few_buckets() -> None:
    run_ranks(2, zero_2_memory)


def bytes_reduced(world: World, zero_stage: int, num_micro_batches: int, **options: object) -> tuple[int, int]:
    """(bytes put into reductions, bytes of all gradients) with tp 1, so that only sums over data are made."""
    mesh = Mesh(Grid.of(Layout(dp=world.size)), world)
    stage = ToyStage(mesh, torch.float32)
    main = MainGrads(stage, stage.syncs(), mesh.data, zero_stage, **options)
    accumulate(stage, main, 0, num_micro_batches, overlap=True)
    return main.reduced_bytes, sum(4 * bucket.size for bucket in main.buckets)


def test_bytes_are_counted_and_do_not_depend_on_micro_batches() -> None:
    for zero_stage, num_micro_batches in ((0, 1), (1, 1), (2, 1), (2, 7)):
        for counted, wanted in run_ranks(4, bytes_reduced, zero_stage, num_micro_batches):
            assert counted == wanted > 0
        halved = run_ranks(4, partial(bytes_reduced, reduce_dtype=torch.bfloat16), zero_stage, num_micro_batches)
        assert all(2 * counted == wanted for counted, wanted in halved)


def in_bf16(world: World, zero_stage: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Where this rank's share starts, the share reduced in bf16, and what every rank put in."""
    mesh = Mesh(Grid.of(Layout(dp=world.size)), world)
    module = nn.Linear(100, 1, bias=False)
    main = MainGrads(module, {}, mesh.data, zero_stage, reduce_dtype=torch.bfloat16)
    mine = torch.randn(1, 100, generator=torch.Generator().manual_seed(world.rank))
    module(mine).backward()
    main.reduce()
    return main.buckets[0].start, main.buckets[0].share, mine[0]


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_only_the_wire_is_in_bf16(zero_stage: int) -> None:
    by_rank = run_ranks(4, in_bf16, zero_stage)
    parts = [mine.bfloat16().float() for _, _, mine in by_rank]
    want = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    want = torch.cat([want if zero_stage else want.bfloat16().float(), torch.zeros(28)])
    for start, share, _ in by_rank:
        assert torch.equal(share, want[start : start + len(share)])


class Broken(Exception):
    pass


def hook_raises(world: World, late: bool) -> None:
    def broken(bucket: GradBucket) -> Pending:
        def fail(share: torch.Tensor) -> torch.Tensor:
            raise Broken("no route")

        return plain(bucket).then(fail) if late else fail(bucket.share)

    mesh = Mesh(Grid.of(Layout(dp=world.size)), world)
    module = nn.Linear(3, 1, bias=False)
    main = MainGrads(module, {}, mesh.data, hook=broken)
    main.arm((0,))
    with pytest.raises(Broken, match="no route"):
        module(torch.ones(1, 3)).backward()
        assert late
        main.finish()


def hook_gives_all(world: World) -> None:
    mesh = Mesh(Grid.of(Layout(dp=world.size)), world)
    module = nn.Linear(3, 1, bias=False)
    main = MainGrads(module, {}, mesh.data, 1, hook=lambda bucket: Pending(lambda: bucket.grads))
    with pytest.raises(ValueError, match=r"hook gave \(64,\) for bucket 0, whose share is \(32,\)"):
        main.reduce()


def test_a_hook_must_give_the_share() -> None:
    run_ranks(2, hook_gives_all)


@pytest.mark.parametrize("late", [False, True])
def test_errors_of_a_hook_travel(late: bool) -> None:
    run_ranks(2, hook_raises, late)


def test_half_gradients_accumulate_in_fp32() -> None:
    """512 micro-batches of bf16 gradients: right to 1e-6 of their sum, where a bf16 sum is 2.6% off."""
    mesh = Mesh(Grid.of(Layout()), World.single(CPU))
    module = nn.Linear(1, 64, bias=False).bfloat16()
    main = MainGrads(module, {}, mesh.data)
    want, rounded = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.bfloat16)
    for micro_batch in range(512):
        grad = torch.rand(64, generator=torch.Generator().manual_seed(micro_batch)).bfloat16()
        (module(torch.ones(1, 1, dtype=torch.bfloat16)) * grad).sum().backward()
        want += grad.double()
        rounded += grad
    main.reduce()
    got = main.buckets[0].share[:64].double()
    assert ((got - want).norm() / want.norm()).item() < 1e-6
    assert ((rounded.double() - want).norm() / want.norm()).item() > 1e-2


class Linears(nn.Module):
    """A column- and a row-parallel linear with biases, and a scale between them that comes first as a parameter."""

    def __init__(self, dtype: torch.dtype, mesh: Mesh) -> None:
        super().__init__()
        options = dict(bias=True, tp=mesh.tp, sequence_parallel=False, dtype=dtype, device=CPU)
        self.scale = nn.Parameter(torch.ones(6, dtype=dtype))
        self.up, self.down = ColumnParallelLinear(4, 6, **options), RowParallelLinear(6, 4, **options)
        for seed, param in enumerate(self.parameters()):
            param.data.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh() * self.scale).square().sum()


def split_backward(world: World, zero_stage: int) -> None:
    """Weight gradients by `WeightGrads`, at once or kept for later, are autograd's; buckets start in the later run."""
    mesh = Mesh(Grid.of(Layout(dp=world.size)), world)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(world.rank), dtype=torch.float64)
    want = MainGrads(plain_module := Linears(torch.float64, mesh), {}, mesh.data, zero_stage, bucket_bytes=200)
    for _ in range(4):
        plain_module(x).backward()
    want.reduce()
    module, weight_grads, started = Linears(torch.float64, mesh), WeightGrads(), []

    def noting(bucket: GradBucket) -> Pending:
        started.append(bucket.index)
        return plain(bucket)

    main = MainGrads(module, {}, mesh.data, zero_stage, bucket_bytes=200, hook=noting, weight_grads=weight_grads)
    assert weight_grads.weights == {module.up.weight, module.down.weight}
    module(x).backward()
    with weight_grads.keeping() as kept:
        module(x).backward()
        module(x).backward()
    weight_grads.run(kept)
    with weight_grads.keeping() as kept:
        module(x).backward()
    names = [[slot.name for slot in bucket.slots] for bucket in main.buckets]
    assert names == [["down.weight"], ["up.weight"], ["down.bias", "up.bias", "scale"]]
    main.arm(tuple(range(len(names))))
    weight_grads.run(kept)
    assert started == [0, 1, 2]  # the biases had their gradients in the backward before
    main.reduce()
    for got, bucket in zip(main.buckets, want.buckets, strict=True):
        torch.testing.assert_close(got.share, bucket.share, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_weight_gradients_that_run_later_complete_their_buckets(zero_stage: int) -> None:
    run_ranks(2, split_backward, zero_stage)


def test_a_linears_weight_that_is_used_elsewhere_too_loses_nothing() -> None:
    mesh = Mesh(Grid.of(Layout()), World.single(CPU))
    module = Linears(torch.float64, mesh)
    x = torch.ones(5, 4, dtype=torch.float64)
    loss = lambda: module(x) + module.up.weight.square().sum()  # noqa: E731
    [want] = torch.autograd.grad(loss(), [module.up.weight])
    main = MainGrads(module, {}, mesh.data, bucket_bytes=1, weight_grads=WeightGrads())
    loss().backward()
    main.reduce()
    [got] = [bucket.share for bucket in main.buckets if bucket.slots[0].name == "up.weight"]
    torch.testing.assert_close(got[: want.numel()].view_as(want), want, rtol=1e-12, atol=1e-12)
