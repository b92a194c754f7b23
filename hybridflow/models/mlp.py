"""The feed-forward block of a layer on one tensor rank. Never initialises weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hybridflow.kernels.activation import swiglu
from hybridflow.models.config import ModelConfig
from hybridflow.parallel.linear import ColumnParallelLinear, RowParallelLinear
from hybridflow.parallel.mesh import AxisGroup


class MLP(nn.Module):
    """SwiGLU feed-forward block; gate and up are one matrix `[gate; up]` on each rank."""

    def __init__(self, config: ModelConfig, *, tp: AxisGroup, sequence_parallel: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__()
        shared = dict(bias=config.mlp_bias, tp=tp, sequence_parallel=sequence_parallel, dtype=dtype, device=device)
        size = config.intermediate_size // tp.size
        self.activate: Callable[[Tensor], Tensor] = swiglu
        self.gate_up = ColumnParallelLinear(config.hidden_size, 2 * size, **shared)
        self.down = RowParallelLinear(size, config.hidden_size, **shared)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.gate_up(x)))
