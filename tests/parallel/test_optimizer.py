"""The sharded AdamW against torch's on the whole model: norm, clipping, parameters, skipped steps, learning rates."""

import math

import pytest
import torch
from torch import nn

from hybridflow.parallel.gradients import MainGrads
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.optimizer import AdamWSettings, Decay, LrSchedule, ShardedAdamW
from hybridflow.parallel.world import World
from tests.parallel.toy_replica import MICRO_BATCHES, ToyStage, ToyWhole
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SETTINGS = AdamWSettings(betas=(0.9, 0.95), weight_decay=0.1, clip_grad_norm=2.0)
LR = LrSchedule(peak=0.05, warmup_steps=2, total_steps=4, decay=Decay.COSINE, floor=0.01)


def made(mesh: Mesh, dtype: torch.dtype, zero_stage: int) -> tuple[ToyStage, ShardedAdamW]:
    stage = ToyStage(mesh, dtype)
    main = MainGrads(stage, stage.syncs(), mesh.data, zero_stage)
    return stage, ShardedAdamW(main, mesh.replica, SETTINGS, LR)


def accumulate(stage: ToyStage, optimizer: ShardedAdamW, step: int) -> None:
    optimizer.zero_grad()
    for micro_batch in range(MICRO_BATCHES):
        stage.loss(step, micro_batch).backward()
    optimizer.grads.reduce()


def steps_match_whole(world: World, layout: Layout, zero_stage: int) -> dict[str, torch.Tensor]:
    mesh = Mesh(Grid.of(layout), world)
    stage, optimizer = made(mesh, torch.float64, zero_stage)
    whole = ToyWhole()
    adam = whole.adam(SETTINGS.weight_decay, LR.peak, SETTINGS.betas)
    for step in range(4):
        accumulate(stage, optimizer, step)
        info = optimizer.step()
        whole.backward(step, layout)
        norm = nn.utils.clip_grad_norm_(whole.parameters(), SETTINGS.clip_grad_norm)
        for group in adam.param_groups:
            group["lr"] = LR.at(step)
        adam.step()
        assert math.isclose(info.grad_norm, norm.item(), rel_tol=1e-12) and norm > SETTINGS.clip_grad_norm
        assert (info.lr, info.skipped) == (LR.at(step), False)
        for name, param in stage.named_parameters():
            want = stage.local(name, getattr(whole, name).detach())
            torch.testing.assert_close(param.detach(), want, rtol=1e-11, atol=1e-11)
    return {name: param.detach().clone() for name, param in stage.named_parameters()}


def copies_stay_equal(world: World, layout: Layout, zero_stage: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    stage, optimizer = made(Mesh(Grid.of(layout), world), dtype, zero_stage)
    for step in range(3):
        accumulate(stage, optimizer, step)
        optimizer.step()
    return {name: param.detach().float() for name, param in stage.named_parameters() if name != "cut"}


def not_finite(world: World, zero_stage: int) -> None:
    """One rank's NaN makes every rank skip, and the step after it is as if the bad one had not been."""
    mesh = Mesh(Grid.of(Layout(tp=2, dp=2)), world)
    stage, optimizer = made(mesh, torch.float64, zero_stage)
    straight, reference = made(mesh, torch.float64, zero_stage)
    before = {name: param.detach().clone() for name, param in stage.named_parameters()}
    accumulate(stage, optimizer, 0)
    optimizer.zero_grad()
    if world.rank == 2:
        (stage.norm * float("nan")).sum().backward()
    optimizer.grads.reduce()
    info = optimizer.step()
    assert info.skipped and math.isnan(info.grad_norm) and optimizer.num_skipped == 1 and optimizer.num_steps == 0
    assert all(torch.equal(param, before[name]) for name, param in stage.named_parameters())
    accumulate(stage, optimizer, 1)
    accumulate(straight, reference, 1)
    assert optimizer.step() == reference.step()
    for name, param in stage.named_parameters():
        assert torch.equal(param, dict(straight.named_parameters())[name])


def four_ranks(world: World) -> list[list[dict[str, torch.Tensor]]]:
    for layout in (Layout(tp=2, dp=2), Layout(pp=2, dp=2), Layout(tp=2, pp=2), Layout(dp=4), Layout(pp=4)):
        for zero_stage in (0, 1):
            steps_match_whole(world, layout, zero_stage)
    for zero_stage in (0, 1):
        not_finite(world, zero_stage)
    return [copies_stay_equal(world, layout, zero_stage, dtype)
            for layout in (Layout(tp=2, dp=2), Layout(pp=2, dp=2))
            for zero_stage in (0, 1) for dtype in (torch.float32, torch.bfloat16)]


def test_one_rank() -> None:
    steps_match_whole(World.single(CPU), Layout(), 0)
    steps_match_whole(World.single(CPU), Layout(), 1)


def test_four_ranks_match_the_whole_and_copies_stay_equal_bit_for_bit() -> None:
    for case in zip(*run_ranks(4, four_ranks), strict=True):
        for held in case:
            for name, tensor in held.items():
                assert all(torch.equal(tensor, other[name]) for other in case if name in other), name


def test_half_parameters_have_fp32_masters() -> None:
    """Steps far below bf16's resolution add up in the masters; fp32 parameters are their own masters."""
    mesh = Mesh(Grid.of(Layout()), World.single(CPU))
    module = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    module.weight.data.fill_(1.0)
    settings = AdamWSettings(clip_grad_norm=None)
    optimizer = ShardedAdamW(MainGrads(module, {}, mesh.dp), mesh.replica, settings, LrSchedule(peak=1e-3))
    for _ in range(10):
        optimizer.zero_grad()
        module(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optimizer.grads.reduce()
        optimizer.step()
    assert math.isclose(optimizer.shares[0].master[0].item(), 0.99, rel_tol=1e-5)
    assert module.weight.item() == torch.tensor(0.99).bfloat16().item()
    module.weight.data.fill_(3.0)
    optimizer.refresh_masters()
    assert optimizer.shares[0].master[0] == 3.0
    plain = nn.Linear(1, 1, bias=False)
    own = ShardedAdamW(MainGrads(plain, {}, mesh.dp), mesh.replica, settings, LrSchedule(peak=1e-3))
    assert own.shares[0].master.data_ptr() == plain.weight.data_ptr()


@pytest.mark.parametrize(
    ("decay", "rates"),
    [(Decay.CONSTANT, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]), (Decay.LINEAR, [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
     (Decay.COSINE, [0.5, 1.0, 1.0, 0.8828427, 0.6, 0.3171573, 0.2])],
)
def test_learning_rates(decay: Decay, rates: list[float]) -> None:
    schedule = LrSchedule(peak=1.0, warmup_steps=2, total_steps=6, decay=decay, floor=0.2)
    assert [schedule.at(step) for step in range(7)] == pytest.approx(rates)
    assert schedule.at(100) == pytest.approx(rates[-1])
