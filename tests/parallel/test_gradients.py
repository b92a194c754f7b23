"""Main gradients against the whole model: sums over micro-batches, replicas and copies, under both zero stages."""

import pytest
import torch
from torch import nn

from hybridflow.parallel import collectives
from hybridflow.parallel.gradients import GradSync, MainGrads
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.world import World
from tests.parallel.toy_replica import MICRO_BATCHES, ToyStage, ToyWhole
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def reduced(world: World, layout: Layout, zero_stage: int, dtype: torch.dtype, tolerance: float) -> None:
    mesh = Mesh(Grid.of(layout), world)
    stage, whole = ToyStage(mesh, dtype), ToyWhole()
    main = MainGrads(stage, stage.syncs(), mesh.data, zero_stage)
    for step in range(2):  # the second one must not see the first
        main.zero()
        for micro_batch in range(MICRO_BATCHES):
            stage.loss(step, micro_batch).backward()
            assert all(param.grad is None for param in stage.parameters())
        main.reduce()
        whole.backward(step, layout)
        for bucket in main.buckets:
            assert bucket.grads.dtype == torch.promote_types(dtype, torch.float32)
            for slot in bucket.slots:
                want = torch.full_like(bucket.grads, float("nan"))
                want[slot.start : slot.end] = stage.local(slot.name, getattr(whole, slot.name).grad).flatten()
                mine = slice(max(slot.start, bucket.start), min(slot.end, bucket.end))
                torch.testing.assert_close(bucket.grads[mine], want[mine], rtol=tolerance, atol=tolerance)


def all_layouts(world: World) -> None:
    for layout in (Layout(tp=2, dp=2), Layout(pp=2, dp=2), Layout(tp=2, pp=2), Layout(dp=4), Layout(pp=4)):
        for zero_stage in (0, 1):
            reduced(world, layout, zero_stage, torch.float64, 1e-12)
    reduced(world, Layout(tp=2, dp=2), 1, torch.bfloat16, 1e-1)
    collectives.PIECE, before = 4 * 7, collectives.PIECE  # 7 elements of each rank at a time
    reduced(world, Layout(dp=4), 1, torch.float64, 1e-12)
    collectives.PIECE = before


def bytes_reduced(world: World) -> tuple[int, int]:
    """(bytes put into collectives, bytes of all gradients) with tp 1, so that only data-parallel sums are made."""
    mesh = Mesh(Grid.of(Layout(dp=world.size)), world)
    stage = ToyStage(mesh, torch.float32)
    main = MainGrads(stage, stage.syncs(), mesh.dp)
    main.reduce()
    return main.reduced_bytes, sum(bucket.grads.nbytes for bucket in main.buckets)


def test_one_rank() -> None:
    reduced(World.single(CPU), Layout(), 0, torch.float64, 1e-12)
    reduced(World.single(CPU), Layout(), 1, torch.float64, 1e-12)


def test_four_ranks() -> None:
    run_ranks(4, all_layouts)


def test_bytes_are_counted() -> None:
    for counted, wanted in run_ranks(4, bytes_reduced):
        assert counted == wanted > 0


def test_parameters_become_views_and_keep_their_values() -> None:
    mesh = Mesh(Grid.of(Layout()), World.single(CPU))
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 3, bias=False))
    module[1].bias.requires_grad_(False)
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    main = MainGrads(module, {}, mesh.dp)
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
    main = MainGrads(module, {}, mesh.dp)
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
    bucket = MainGrads(module, {"c": GradSync(counted=False)}, mesh.dp).buckets[0]
    assert bucket.counted_ranges() == [(0, 104), (192, 232)]  # slots start at 0, 64, 128, 192
    bucket.start, bucket.end = 70, 200
    assert bucket.counted_ranges() == [(0, 34), (122, 130)]


def test_faults() -> None:
    mesh = Mesh(Grid.of(Layout()), World.single(CPU))
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="zero_stage 3 must be 0"):
        MainGrads(module, {}, mesh.dp, 3)
    with pytest.raises(ValueError, match=r"name no parameter of the stage: \['wieght'\]"):
        MainGrads(module, {"wieght": GradSync()}, mesh.dp)
    main = MainGrads(module, {}, mesh.dp)
    main.reduce()
    with pytest.raises(AssertionError, match="once a step"):
        main.reduce()
