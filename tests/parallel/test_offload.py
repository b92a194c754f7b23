"""Roles that leave the device between phases: every bit comes back, as the same views, through the same buffers."""

import pytest
import torch
from torch import nn

from hybridflow.parallel.gradients import MainGrads
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.offload import HostCopy
from hybridflow.parallel.optimizer import AdamWSettings, LrSchedule, ShardedAdamW
from hybridflow.parallel.world import World
from tests.parallel.toy_replica import ToyStage
from tests.ranks import run_ranks


def learn(stage: ToyStage, optimizer: ShardedAdamW, step: int) -> None:
    stage.loss(step, 0).backward()
    optimizer.grads.reduce()
    optimizer.step()
    optimizer.zero_grad()


def all_tensors(optimizer: ShardedAdamW) -> list[torch.Tensor]:
    """Parameters, reduced gradients and state, flat."""
    held = [tensor for bucket in optimizer.grads.buckets for tensor in (bucket.params, bucket.share)]
    return held + optimizer.tensors()


def there_and_back(world: World, zero_stage: int, dtype: torch.dtype, offload: bool) -> None:
    mesh = Mesh(Grid.of(Layout(tp=2, dp=world.size // 2)), world)
    stages = [ToyStage(mesh, dtype) for _ in range(2)]
    optimizers = [ShardedAdamW(MainGrads(stage, stage.syncs(), mesh.data, zero_stage, bucket_bytes=300), mesh.model,
                               AdamWSettings(), LrSchedule(0.05), offload=offload) for stage in stages]
    moving, (flat, others) = optimizers[0], [all_tensors(optimizer) for optimizer in optimizers]
    role = HostCopy(flat)
    for step in range(3):
        for stage, optimizer in zip(stages, optimizers, strict=True):
            learn(stage, optimizer, step)
        role.to_host()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in flat)
        role.to_device()
    assert role.nbytes == sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in flat}.values())
    for mine, other in zip(flat, others, strict=True):
        assert torch.equal(mine, other)
    for bucket in moving.grads.buckets:
        bucket.params.fill_(7.0)
    assert all((param == 7.0).all() for param in stages[0].parameters())  # still views


@pytest.mark.parametrize(("zero_stage", "dtype", "offload"), [
    (0, torch.float32, False), (1, torch.bfloat16, False), (2, torch.float32, False), (2, torch.bfloat16, True)])
def test_training_goes_on_as_if_it_had_never_left(zero_stage: int, dtype: torch.dtype, offload: bool) -> None:
    run_ranks(4, there_and_back, zero_stage, dtype, offload)


def test_scratch_is_freed_without_a_copy_and_comes_back_as_zeros() -> None:
    module = nn.Linear(3, 2)
    weights, grads = [param.data for param in module.parameters()], torch.full((5,), 3.0)
    before = [weight.clone() for weight in weights]
    role = HostCopy([*weights, weights[0][1:]], scratch=[grads, weights[0]])  # views count once, kept ones win
    assert role.nbytes == 4 * (6 + 2 + 5)
    for _ in range(2):
        role.to_host()
        assert role.on_host and grads.untyped_storage().nbytes() == 0
        role.to_device()
        assert torch.equal(grads, torch.zeros(5)) and not role.on_host
        assert all(torch.equal(weight, old) for weight, old in zip(weights, before))
    assert module(torch.ones(1, 3)).isfinite().all()


def test_moving_twice_is_an_error() -> None:
    role = HostCopy([torch.zeros(3)])
    with pytest.raises(AssertionError, match="were not moved"):
        role.to_device()
    role.to_host()
    with pytest.raises(AssertionError, match="on the host already"):
        role.to_host()
