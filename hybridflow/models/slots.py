"""Rows of a tensor laid into slots and read from them, with gradients that are the same every time.

Plain indexing would add gradients up atomically on a GPU. Where no two slots are the same no sum is needed: these
gather, or scatter into zeros. The others add up in a fixed order.
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


def repeat_rows(x: Tensor, owners: Tensor) -> Tensor:
    """`x[owners]`, for few rows of `x` that are read often."""
    return _RepeatRows.apply(x, owners)


def read_rows(x: Tensor, places: Tensor) -> Tensor:
    """`x[places]` of `x` `[rows, size]`, for places that are mostly distinct."""
    return _ReadRows.apply(x, places)


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


class _RepeatRows(torch.autograd.Function):
    """Gather. Its gradient is a product with the matrix of ones where a row was read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owners: Tensor) -> Tensor:
        ctx.save_for_backward(owners)
        ctx.size = x.shape[0]
        return x.index_select(0, owners)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (owners,) = ctx.saved_tensors
        reads = torch.arange(ctx.size, device=grad.device)[:, None] == owners  # [rows, reads]
        return (reads.to(grad.dtype) @ grad.flatten(1)).view(ctx.size, *grad.shape[1:]), None


class _ReadRows(torch.autograd.Function):
    """Gather. Its gradient is a sum that torch sorts where threads would race."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = x.shape[0]
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.size, *grad.shape[1:])
        if grad.is_cuda:
            return total.index_put_((places,), grad, accumulate=True), None
        return total.index_add_(0, places, grad), None
