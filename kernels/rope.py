"""Rotary position embedding of heads whose first and second halves are the rotated pairs (the Hugging Face order).

Knows tensors only: which angles a model uses is decided in `hybridflow.models.rope`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridflow.kernels import native_backward


class Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation by the opposite angle, so nothing but the tables is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, signed_sin)
        return _turn(x, cos, signed_sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, signed_sin = ctx.saved_tensors
        if native_backward.has_kernels(grad):
            return native_backward.rotate(grad, cos, signed_sin, back=True), None, None
        return torch.addcmul(grad * cos, grad.roll(grad.shape[-1] // 2, -1), signed_sin, value=-1), None, None


def apply_rope(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate every head by its token's angles (Su et al. 2021, arXiv 2104.09864, eq. 34).

    Args:
        x: `[tokens, heads, head_dim]`.
        cos: `[tokens, 1, head_dim]`, both halves equal.
        signed_sin: `[tokens, 1, head_dim]`, the first half negated: `roll(x) * signed_sin` is then the whole
            off-diagonal part, which makes three operations of seven.
    """
    return Rotate.apply(x, cos, signed_sin) if torch.is_grad_enabled() else _turn(x, cos, signed_sin)


def _turn(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    if not torch.is_inference_mode_enabled() and native_backward.has_kernels(x):
        return native_backward.rotate(x, cos, signed_sin)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def apply_rope_reference(x: Tensor, angles: Tensor) -> Tensor:
    """The same from `angles` `[tokens, head_dim/2]` as a complex product: `(a + ib) * exp(i angle)`."""
    a, b = x.chunk(2, dim=-1)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)
