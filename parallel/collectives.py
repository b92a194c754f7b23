"""Collectives over an axis group, and the autograd pairs of tensor and sequence parallelism.

A group of one is the identity. Each pair is named after what its forward does; the backward is its adjoint for the
way the result is used, which the docstring states (Megatron-LM, arXiv 1909.08053 and 2205.05198).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.mesh import AxisGroup

# On a CPU, a direct exchange of at most this many bytes beats gloo's ring: at 128 KiB and two ranks it costs a third.
DIRECT_BYTES = 1 << 20


def all_reduce(x: Tensor, group: AxisGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `x` over the group in place and return it; the result is the same, bit for bit, on every member."""
    if group.size == 1:
        return x
    if op == dist.ReduceOp.SUM and _is_direct(x, group.size - 1):
        mine = x.contiguous()
        return x.copy_(_sum_in_order(_exchange([mine] * group.size, group)))
    dist.all_reduce(x, op, group=group.process_group)
    return x


def all_gather(x: Tensor, group: AxisGroup) -> Tensor:
    """Concatenate every member's `x` (equal shapes) on dim 0, in coordinate order."""
    if group.size == 1:
        return x
    if x.device.type == "cpu":
        return torch.cat(_exchange([x.contiguous()] * group.size, group))
    return _gather_on_device(x.contiguous(), group)


def reduce_scatter(x: Tensor, group: AxisGroup) -> Tensor:
    """This member's equal dim-0 slice of the sum of every member's `x`.

    On a CPU every member sends the others their slices and sums its own: the bytes of a ring, and on gloo 3 to 4 times
    faster than its reduce-scatter.
    """
    if group.size == 1:
        return x
    assert x.shape[0] % group.size == 0, (x.shape, group.size)
    if x.device.type == "cpu":
        return _sum_in_order(_exchange(list(x.contiguous().chunk(group.size)), group))
    return _reduce_scatter_on_device(x.contiguous(), group)


def _is_direct(x: Tensor, copies: int) -> bool:
    return x.device.type == "cpu" and copies * x.numel() * x.element_size() <= DIRECT_BYTES


def _gather_on_device(x: Tensor, group: AxisGroup) -> Tensor:
    """`all_gather` by the backend, which fills the result in rank order: no copy where that is coordinate order."""
    gathered = x.new_empty(group.size, *x.shape)
    dist.all_gather_into_tensor(gathered.flatten(0, 1), x, group=group.process_group)
    if not group.is_sorted:
        gathered = gathered[list(group.order)]
    return gathered.flatten(0, 1)


def _reduce_scatter_on_device(x: Tensor, group: AxisGroup) -> Tensor:
    """`reduce_scatter` by the backend, which deals out slices in rank order: no copy where that is coordinate order."""
    if not group.is_sorted:
        members = sorted(range(group.size), key=lambda member: group.order[member])
        x = x.unflatten(0, (group.size, -1))[members].flatten(0, 1)
    mine = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    dist.reduce_scatter_tensor(mine, x, group=group.process_group)
    return mine


def _exchange(parts: list[Tensor], group: AxisGroup) -> list[Tensor]:
    """Send part i to member i; what every member sent me, in coordinate order (my own part stands for mine)."""
    received = [part if i == group.index else torch.empty_like(part) for i, part in enumerate(parts)]
    others = [i for i in range(group.size) if i != group.index]
    works = [dist.irecv(received[i], group.ranks[i], group=group.process_group) for i in others]
    works += [dist.isend(parts[i], group.ranks[i], group=group.process_group) for i in others]
    for work in works:
        work.wait()
    return received


def _sum_in_order(parts: list[Tensor]) -> Tensor:
    """The sum in coordinate order, so that every member that computes it gets the same bits."""
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def my_slice(x: Tensor, group: AxisGroup) -> Tensor:
    """This member's equal dim-0 slice of a replicated `x`."""
    assert x.shape[0] % group.size == 0, (x.shape, group.size)
    return x.chunk(group.size)[group.index] if group.size > 1 else x


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(), ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        return all_reduce(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.group), None


class _ReduceScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return my_slice(grad, ctx.group).contiguous(), None


def copy_to(x: Tensor, group: AxisGroup) -> Tensor:
    """Identity; gradients are summed over the group (a replicated input of column-parallel weights)."""
    return _Copy.apply(x, group) if group.size > 1 else x


def reduce_from(x: Tensor, group: AxisGroup) -> Tensor:
    """Sum over the group; the gradient passes through (the output of row-parallel weights)."""
    return _Reduce.apply(x, group) if group.size > 1 else x


def gather_tokens(x: Tensor, group: AxisGroup) -> Tensor:
    """`[tokens/n, ...] -> [tokens, ...]`; gradients are summed and split (sequence parallel into column-parallel)."""
    return _GatherTokens.apply(x, group) if group.size > 1 else x


def reduce_scatter_tokens(x: Tensor, group: AxisGroup) -> Tensor:
    """`[tokens, ...] -> [tokens/n, ...]` of the sum; gradients are gathered (row-parallel into sequence parallel)."""
    return _ReduceScatterTokens.apply(x, group) if group.size > 1 else x


def gather_replicated(x: Tensor, group: AxisGroup) -> Tensor:
    """`[tokens/n, ...] -> [tokens, ...]` into a computation that every member does alike: its gradient is split."""
    return _GatherReplicated.apply(x, group) if group.size > 1 else x
