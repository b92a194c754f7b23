"""Rows of a tensor laid into slots and read from them, where no two slots are the same: no sum is ever needed.

Plain indexing would add gradients up atomically; these two gather, or scatter into zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def index_on(device: torch.device, index: Tensor) -> Tensor:
    """An index made on the host, on `device`. A plain copy would have the host wait for all that the device has queued.
    """
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)


def to_slots(x: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
    """`x[tokens]`, of which only `slots` matter: `tokens[slots]` is 0, 1, 2, ..., and the gradient elsewhere zero."""
    return _ToSlots.apply(x, tokens, slots)


def from_slots(x: Tensor, slots: Tensor) -> Tensor:
    """`x[slots]` for distinct `slots`; the gradient of what is not read is zero."""
    return _FromSlots.apply(x, slots)


class _ToSlots(torch.autograd.Function):
    """Gather. Its gradient is a gather too, from the slots that are not padding, where it is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None


class _FromSlots(torch.autograd.Function):
    """Gather; its gradient is a scatter into zeros. Slots are distinct, so it needs no atomic sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.size = x.shape[0]
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, *ctx.saved_tensors, grad), None
