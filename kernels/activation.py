"""The gated activation of the feed-forward block. Knows tensors only."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridflow.kernels import native_backward, native_rows


class SwiGLU(torch.autograd.Function):
    """torch's own two gradients, written into the halves of one tensor, so that no copy joins them. Only the input is
    kept: on a CPU, computing silu again costs less than to store it and fetch it back.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _forward(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        if native_backward.has_kernels(gate_up):
            return native_backward.swiglu_backward(grad, gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        active = F.silu(gate)
        torch.mul(grad, active, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(torch.mul(grad, up, out=active), gate, grad_input=grad_gate)
        return grad_gate_up


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` (Shazeer 2020, arXiv 2002.05202, eq. 6).

    Args:
        gate_up: `[..., 2 * size]`, the gate in the first half.

    Returns:
        `[..., size]`.
    """
    return SwiGLU.apply(gate_up) if torch.is_grad_enabled() else _forward(gate_up)


def _forward(gate_up: Tensor) -> Tensor:
    if not torch.is_inference_mode_enabled() and native_backward.has_kernels(gate_up):
        return native_rows.swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """The same by its definition."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up
