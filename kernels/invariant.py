"""The operations of a layer with forwards that are batch-invariant and backwards by torch's formulas.

A forward gives a token the same bits whatever stands beside it, those that generation gives it (`native_rows`,
`native_ops`), on a CPU, in fp32, bf16 and fp64. A backward is the ordinary one: right to rounding, not invariant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridflow.kernels import native_ops, native_rows
from hybridflow.kernels.activation import SwiGLU
from hybridflow.kernels.norm import inverse_root, rms_norm_gradients
from hybridflow.kernels.packed_weights import PackedWeights
from hybridflow.kernels.rope import Rotate


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`kernels.norm.rms_norm`."""
    return _RMSNorm.apply(x, weight, eps)


def apply_rope(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """`kernels.rope.apply_rope`."""
    return _Rotate.apply(x, cos, signed_sin)


def swiglu(gate_up: Tensor) -> Tensor:
    """`kernels.activation.swiglu`."""
    return _SwiGLU.apply(gate_up)


class InvariantProduct:
    """y = x W^T + b without a gradient: a `parallel.linear.Product`.

    Args:
        segments: parts in which k is summed (`native_ops.linear`).
        wide: the result is fp32 for bf16, to be rounded after a sum over ranks.
    """

    def __init__(self, weights: PackedWeights, segments: int = 1, *, wide: bool = False) -> None:
        self._weights, self._segments, self._wide = weights, segments, wide

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return native_ops.linear(x, self._weights.of(weight), bias, self._segments, self._wide)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return native_rows.rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rows = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(-1, x.shape[-1])
        return *rms_norm_gradients(grad, x, weight, inverse_root(rows, ctx.eps)), None


class _Rotate(Rotate):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, signed_sin)
        half = x.shape[-1] // 2
        return native_rows.rope(x, cos[:, 0, :half], signed_sin[:, 0, half:])


class _SwiGLU(SwiGLU):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return native_rows.swiglu(gate_up)
