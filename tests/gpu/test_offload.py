"""What only a GPU can show of offloading: memory is freed, and copies on the side stream come in time."""

import pytest
import torch
from torch import nn

from hybridflow.parallel.gradients import MainGrads
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.offload import HostCopy
from hybridflow.parallel.optimizer import LrSchedule, ShardedAdamW
from hybridflow.parallel.optimizer_state import AdamWSettings
from hybridflow.parallel.world import World

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WIDTH, DEPTH = 1024, 6


def made(dtype: torch.dtype, offload: bool) -> tuple[nn.Module, ShardedAdamW]:
    mesh = Mesh(Grid.of(Layout()), World.single(torch.device("cuda", 0)))
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(DEPTH)))
    for seed, param in enumerate(module.parameters()):
        param.data.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) / WIDTH**0.5)
    main = MainGrads(module.to("cuda"), {}, mesh.data, bucket_bytes=4 * WIDTH**2)
    return module, ShardedAdamW(main, mesh.model, AdamWSettings(weight_decay=0.1), LrSchedule(1e-3), offload=offload)


def learn(module: nn.Module, optimizer: ShardedAdamW, step: int) -> None:
    dtype = next(module.parameters()).dtype
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step)).to("cuda", dtype)
    module(x).float().square().sum().backward()
    optimizer.grads.reduce()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_optimizer_takes_the_same_steps(dtype: torch.dtype):
    (near, here), (far, there) = made(dtype, offload=False), made(dtype, offload=True)
    assert all(tensor.device.type == "cpu" for tensor in there.tensors())
    for step in range(5):
        learn(near, here, step)
        learn(far, there, step)
    for mine, other in zip(here.shares, there.shares, strict=True):
        torch.testing.assert_close(mine.master.cpu(), other.master, rtol=1e-4, atol=1e-5)
        assert torch.equal(other.bucket.my_params.cpu(), other.master.to(dtype))  # the last copy has landed


def test_a_role_on_the_host_leaves_no_memory_behind_and_comes_back():
    (module, optimizer), (stays, reference) = made(torch.bfloat16, False), made(torch.bfloat16, False)
    role = HostCopy(optimizer.tensors() + [bucket.params for bucket in optimizer.grads.buckets],
                    scratch=[bucket.share for bucket in optimizer.grads.buckets])
    for step in range(3):
        learn(module, optimizer, step)
        learn(stays, reference, step)
        held = torch.cuda.memory_allocated()
        role.to_host()
        assert held - torch.cuda.memory_allocated() >= role.nbytes
        torch.full((role.nbytes,), 255, dtype=torch.uint8, device="cuda")  # somebody else uses the memory meanwhile
        role.to_device()
    for param, other in zip(module.parameters(), stays.parameters(), strict=True):
        assert torch.equal(param, other)
