"""The sharded AdamW against torch's on the whole model: norm, clipping, parameters, skipped steps, learning rates."""

import math

import pytest
import torch
from torch import nn

from hybridflow.parallel.gradients import MainGrads
from hybridflow.parallel.loss_scale import LossScale
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.optimizer import AdamWSettings, Decay, LrSchedule, ShardedAdamW
from hybridflow.parallel.world import World
from tests.parallel.toy_replica import MICRO_BATCHES, ToyStage, ToyWhole
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SETTINGS = AdamWSettings(betas=(0.9, 0.95), weight_decay=0.1, clip_grad_norm=2.0)
LR = LrSchedule(peak=0.05, warmup_steps=2, total_steps=4, decay=Decay.COSINE, floor=0.01)


def made(mesh: Mesh, dtype: torch.dtype, zero_stage: int, bucket_bytes: int | None = 300,
         **options: object) -> tuple[ToyStage, ShardedAdamW]:
    stage = ToyStage(mesh, dtype)
    main = MainGrads(stage, stage.syncs(), mesh.data, zero_stage, bucket_bytes=bucket_bytes)
    return stage, ShardedAdamW(main, mesh.model, SETTINGS, LR, **options)


def accumulate(stage: ToyStage, optimizer: ShardedAdamW, step: int) -> None:
    optimizer.zero_grad()
    for micro_batch in range(MICRO_BATCHES):
        stage.loss(step, micro_batch).backward()
    optimizer.grads.reduce()


def steps_match_whole(world: World, layout: Layout, zero_stage: int, **options: object) -> None:
    mesh = Mesh(Grid.of(layout), world)
    stage, optimizer = made(mesh, torch.float64, zero_stage, **options)
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


def copies_stay_equal(world: World, layout: Layout, zero_stage: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Parameters after three steps: all that ranks share. Offloaded they are the same, bit for bit."""
    mesh = Mesh(Grid.of(layout), world)
    stage, optimizer = made(mesh, dtype, zero_stage)
    far, offloaded = made(mesh, dtype, zero_stage, offload=True)
    for step in range(3):
        accumulate(stage, optimizer, step)
        accumulate(far, offloaded, step)
        assert optimizer.step() == offloaded.step()
    for name, tensor in optimizer.storages().items():
        assert torch.equal(tensor, offloaded.storages()[name])
    for name, param in far.named_parameters():
        assert torch.equal(param, dict(stage.named_parameters())[name])
    assert all(share.master.data_ptr() != share.bucket.my_params.data_ptr() for share in offloaded.shares)
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


def gradients_of_ones(optimizer: ShardedAdamW, spoilt: str | None, value: float) -> None:
    """Main gradients of 1, with one bad element in that of parameter `spoilt` on this rank."""
    for bucket in optimizer.grads.buckets:
        for slot in bucket.slots:
            bucket.main_grad(slot).fill_(1.0)
            if slot.name == spoilt:
                bucket.main_grad(slot).view(-1)[-1] = value
    optimizer.grads.reduce()


def one_bad_element(world: World, layout: Layout, zero_stage: int) -> None:
    """Wherever it is, every rank skips: in a copy that no norm counts too, and in any share."""
    mesh = Mesh(Grid.of(layout), world)
    stage, optimizer = made(mesh, torch.float32, zero_stage)
    before = {name: param.detach().clone() for name, param in stage.named_parameters()}
    for rank in range(world.size):
        for name in ("bias", "norm", "cut", "tied"):
            for value in (math.nan, math.inf):
                here = world.rank == rank and name in before
                gradients_of_ones(optimizer, name if here else None, value)
                anywhere = torch.tensor([here])
                torch.distributed.all_reduce(anywhere, torch.distributed.ReduceOp.MAX)
                if anywhere.item():
                    info = optimizer.step()
                    assert info.skipped and not math.isfinite(info.grad_norm), (layout, zero_stage, rank, name)
                optimizer.zero_grad()
    assert all(torch.equal(param, before[name]) for name, param in stage.named_parameters())
    assert optimizer.num_steps == 0 and optimizer.num_nonfinite == optimizer.num_skipped > 0


def capped(world: World, zero_stage: int) -> None:
    """Two bad steps in a row are skipped, a good one starts the count again, the third in a row raises everywhere."""
    stage, optimizer = made(Mesh(Grid.of(Layout(tp=2, dp=2)), world), torch.float32, zero_stage, max_skips=2)
    for bad in (True, True, False, True, True, True):
        gradients_of_ones(optimizer, "cut" if bad and world.rank == 3 else None, math.nan)
        if optimizer.num_nonfinite == 2 and bad:
            with pytest.raises(FloatingPointError, match="not finite in 3 optimizer steps in a row"):
                optimizer.step()
            break
        optimizer.skip()  # nothing to learn from: neither good nor bad
        assert optimizer.step().skipped is bad
        optimizer.zero_grad()
    assert (optimizer.num_steps, optimizer.num_skipped, optimizer.num_nonfinite) == (1, 10, 3)


def four_ranks(world: World) -> list[list[dict[str, torch.Tensor]]]:
    for layout in (Layout(tp=2, dp=2), Layout(pp=2, dp=2), Layout(tp=2, pp=2), Layout(dp=4), Layout(pp=4),
                   Layout(dp=2, cp=2)):
        for zero_stage in (0, 1, 2):
            steps_match_whole(world, layout, zero_stage, offload=zero_stage == 2)
    for zero_stage in (0, 1, 2):
        not_finite(world, zero_stage)
        capped(world, zero_stage)
        for layout in (Layout(tp=2, dp=2), Layout(pp=2, dp=2), Layout(tp=2, cp=2)):
            one_bad_element(world, layout, zero_stage)
    return [copies_stay_equal(world, layout, zero_stage, dtype)
            for layout in (Layout(tp=2, dp=2), Layout(pp=2, dp=2))
            for zero_stage in (0, 1, 2) for dtype in (torch.float32, torch.bfloat16)]


def test_one_rank() -> None:
    steps_match_whole(World.single(CPU), Layout(), 0)
    steps_match_whole(World.single(CPU), Layout(), 1)
    steps_match_whole(World.single(CPU), Layout(), 2, offload=True)


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
    optimizer = ShardedAdamW(MainGrads(module, {}, mesh.data), mesh.model, settings, LrSchedule(peak=1e-3))
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
    own = ShardedAdamW(MainGrads(plain, {}, mesh.data), mesh.model, settings, LrSchedule(peak=1e-3))
    assert own.shares[0].master.data_ptr() == plain.weight.data_ptr()


def scaled_steps(loss_scale: LossScale | None, dtype: torch.dtype, overflow_at: int | None) -> list:
    """Three steps of a small model: what each said, and the weights after it."""
    mesh = Mesh(Grid.of(Layout()), World.single(CPU))
    module = nn.Linear(4, 3, bias=False, dtype=dtype)
    module.weight.data.copy_(torch.arange(12.0).view(3, 4) / 8)
    settings = AdamWSettings(weight_decay=0.1, clip_grad_norm=0.25)
    optimizer = ShardedAdamW(MainGrads(module, {}, mesh.data), mesh.model, settings, LR, loss_scale=loss_scale)
    said = []
    for step in range(3):
        x = torch.full((2, 4), 0.125, dtype=dtype)
        loss = module(x).float().square().sum() * (1e9 if step == overflow_at else 1.0)
        (loss * optimizer.scale).backward()
        optimizer.grads.reduce()
        said.append((optimizer.step(), module.weight.detach().clone()))
        optimizer.zero_grad()
    return said


def test_the_loss_scale_is_divided_out_once() -> None:
    """In fp32 a power of two changes no bit: not of the norm, the clipping or the weights."""
    plain = scaled_steps(None, torch.float32, None)
    scaled = scaled_steps(LossScale(1024.0), torch.float32, None)
    for (info, weight), (other, same) in zip(plain, scaled, strict=True):
        assert torch.equal(weight, same) and info.grad_norm == other.grad_norm > 0.25
        assert (info.loss_scale, other.loss_scale) == (1.0, 1024.0)


def test_an_overflow_in_fp16_is_skipped_and_halves_the_scale() -> None:
    loss_scale = LossScale(64.0)
    first, second, third = scaled_steps(loss_scale, torch.float16, 1)
    assert [info.skipped for info, _ in (first, second, third)] == [False, True, False]
    assert [info.loss_scale for info, _ in (first, second, third)] == [64.0, 64.0, 32.0] and loss_scale.scale == 32.0
    assert torch.equal(first[1], second[1]) and not torch.equal(second[1], third[1])
    expected = scaled_steps(None, torch.float32, None)
    torch.testing.assert_close(third[1].float(), expected[1][1], rtol=2e-3, atol=2e-3)  # two good steps


def test_counters_go_on_where_they_were() -> None:
    mesh = Mesh(Grid.of(Layout()), World.single(CPU))
    (stage, optimizer), (other_stage, other) = [made(mesh, torch.float64, 0, loss_scale=LossScale(8.0, window=3))
                                                for _ in range(2)]
    for step in range(2):
        accumulate(stage, optimizer, step)
        optimizer.step()
    for name, tensor in optimizer.storages().items():
        other.storages()[name].copy_(tensor)
    other.publish()
    other.restore(optimizer.counters)
    accumulate(stage, optimizer, 2)
    accumulate(other_stage, other, 2)
    assert optimizer.step() == other.step() and optimizer.counters == other.counters
    assert other.scale == 16.0 and other.num_steps == 3
    for name, param in stage.named_parameters():
        assert torch.equal(param, dict(other_stage.named_parameters())[name])


@pytest.mark.parametrize(
    ("decay", "rates"),
    [(Decay.CONSTANT, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]), (Decay.LINEAR, [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
     (Decay.COSINE, [0.5, 1.0, 1.0, 0.8828427, 0.6, 0.3171573, 0.2])],
)
def test_learning_rates(decay: Decay, rates: list[float]) -> None:
    schedule = LrSchedule(peak=1.0, warmup_steps=2, total_steps=6, decay=decay, floor=0.2)
    assert [schedule.at(step) for step in range(7)] == pytest.approx(rates)
    assert schedule.at(100) == pytest.approx(rates[-1])
