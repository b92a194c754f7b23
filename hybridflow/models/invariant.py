"""A stage whose forward is batch-invariant: which of its modules compute with what, and its attention.

Owns the choice. The arithmetic is `kernels.invariant`'s, and what a layer is remains `decoder`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow.kernels import invariant, native_rows
from hybridflow.kernels.packed_weights import PackedWeights
from hybridflow.models.attention import Attention, PackedCausal, RMSNorm
from hybridflow.models.mlp import MLP
from hybridflow.parallel.linear import ColumnParallelLinear, RowParallelLinear


def compute_invariantly(modules: Iterable[nn.Module], weights: PackedWeights, segments: int) -> None:
    """Have the parts of layers among `modules` compute with `kernels.invariant`.

    Args:
        segments: of this rank's share of k (`layout.sum_segments`).
    """
    for module in modules:
        match module:
            case RMSNorm():
                module.operation = invariant.rms_norm
            case Attention():
                module.rotate = invariant.apply_rope
            case MLP():
                module.activate = invariant.swiglu
            case ColumnParallelLinear():
                module.product = invariant.InvariantProduct(weights)
            case RowParallelLinear():
                module.product = invariant.InvariantProduct(weights, segments, wide=module.tp.size > 1)


class InvariantCausal:
    """`PackedCausal` in whose forward each token has the bits that a cache of keys and values gives it. The backward
    computes attention once more, as `PackedCausal` does.
    """

    def __init__(self, lengths: tuple[int, ...], device: torch.device) -> None:
        self._lengths, self._device = lengths, device
        self.lengths = torch.tensor(lengths, dtype=torch.int64)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Attention.apply(q, k, v, self)

    @cached_property
    def ordinary(self) -> PackedCausal:
        return PackedCausal(self._lengths, self._device)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: InvariantCausal) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.causal = causal
        return native_rows.attention(q, k, v, causal.lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.causal.ordinary(0, *inputs)
        return *torch.autograd.grad(out, inputs, grad), None
