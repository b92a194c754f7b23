"""Collectives over an axis group, and the autograd pairs of tensor and sequence parallelism.

A group of one is the identity. `start_*` begin a collective and give a `Pending`; the plain names wait for it. How each
is done is chosen here by the kind of device; the result never depends on timing. Each autograd pair is named after what
its forward does; the backward is its adjoint for the way the result is used, which the docstring states (Megatron-LM,
arXiv 1909.08053 and 2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.mesh import AxisGroup

# On a CPU, a direct exchange of at most this many bytes beats gloo's ring: at 128 KiB and two ranks it costs a third.
DIRECT_BYTES = 1 << 20
PIECE = 1 << 24  # elements in one exchange: bounds the extra memory of a reduce-scatter to some 64 MiB (two in flight)


class Pending:
    """A collective under way, or what a hook makes of one.

    Its tensors must stay as they are until `wait`, which every rank of the group calls in the same order as the starts.

    Attributes:
        nbytes: bytes of the tensor that this rank put into the collective; 0 in a group of one.
    """

    def __init__(self, finish: Callable[[], Tensor], nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self._finish = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """The result; on an accelerator the current stream waits for it, not the host. May be called again."""
        if self._result is None:
            self._result = self._finish()
        return self._result

    @classmethod
    def of(cls, work: dist.Work, result: Tensor, nbytes: int = 0) -> Pending:
        """What torch is doing, and the tensor that it fills."""
        def finish() -> Tensor:
            work.wait()
            return result

        return cls(finish, nbytes)

    def then(self, change: Callable[[Tensor], Tensor]) -> Pending:
        """What `change` makes of the result, when it is waited for."""
        return Pending(lambda: change(self.wait()), self.nbytes)


def start_all_reduce(x: Tensor, group: AxisGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
    """Begin to reduce `x` over the group in place; the result is the same, bit for bit, on every member."""
    if group.size == 1:
        return Pending(lambda: x)
    if op == dist.ReduceOp.SUM and _is_direct(x, group.size - 1):
        arriving = _post([x.contiguous()] * group.size, group)
        return Pending(lambda: x.copy_(_sum_as_tree(arriving.wait())), x.nbytes)
    work = dist.all_reduce(x, op, group=group.process_group, async_op=True)
    return Pending.of(work, x, x.nbytes)


def start_all_gather(x: Tensor, group: AxisGroup, out: Tensor | None = None) -> Pending:
    """Begin to concatenate every member's `x` (equal shapes) on dim 0, in coordinate order.

    Args:
        out: contiguous `[size * x.shape[0], ...]` that takes the result; `x` may be this member's part of it, and then
            nothing is copied.
    """
    if group.size == 1:
        return Pending(lambda: x if out is None else out.copy_(x))
    mine = x.contiguous()
    whole = out if out is not None else x.new_empty(group.size * x.shape[0], *x.shape[1:])
    if x.device.type != "cpu":
        return _gather_on_device(mine, group, whole)
    rows = x.shape[0]
    places = [whole[i * rows : (i + 1) * rows] for i in range(group.size)]
    if places[group.index].data_ptr() != mine.data_ptr():
        places[group.index].copy_(mine)
    arriving = _post([mine] * group.size, group, places)
    return Pending(lambda: (arriving.wait(), whole)[1], x.nbytes)


def start_reduce_scatter(x: Tensor, group: AxisGroup, out: Tensor | None = None,
                         sum_dtype: torch.dtype | None = None) -> Pending:
    """Begin to give this member its equal dim-0 slice of the sum of every member's `x`.

    On a CPU every member sends the others their slices and sums its own: the bytes of a ring, and on gloo 3 to 4 times
    faster than its reduce-scatter. Extra memory is bounded by `PIECE`: what is larger goes in pieces, of which only
    the first travels before `wait`.

    Args:
        out: contiguous `[x.shape[0] / size, ...]` that takes the result; it may be this member's slice of `x`.
        sum_dtype: dtype of sum and result where it is not that of `x` (16 bits on the wire, 32 in the sum).
    """
    assert x.shape[0] % group.size == 0, (x.shape, group.size)
    mine = out if out is not None else x.new_empty(x.shape[0] // group.size, *x.shape[1:], dtype=sum_dtype or x.dtype)
    if group.size == 1:
        return Pending(lambda: x if out is None and sum_dtype in (None, x.dtype) else mine.copy_(x))
    x = x.contiguous()
    if x.device.type != "cpu" and mine.dtype == x.dtype:
        return _reduce_scatter_on_device(x, group, mine)
    return _exchange_and_sum(x, group, mine)


def all_reduce(x: Tensor, group: AxisGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `x` over the group in place and return it; the result is the same, bit for bit, on every member."""
    return start_all_reduce(x, group, op).wait()


def tree_sum(x: Tensor, group: AxisGroup) -> Tensor:
    """`all_reduce` on a CPU whose order of additions is known: adjacent members in pairs, then pairs of pairs.

    A sum whose `segments` parts were added as that tree on one rank (kernels/native/gemm.h) has the same bits where
    2, 4, ... ranks each add their share of the parts, and this adds the shares. `x` takes the result.
    """
    assert x.device.type == "cpu", "elsewhere the backend decides what it adds first"
    if group.size == 1 or _is_direct(x, group.size - 1):
        return all_reduce(x, group)
    flat = x.view(-1)
    part = flat.new_zeros(-(-flat.numel() // group.size) * group.size)
    part[: flat.numel()] = flat
    flat.copy_(all_gather(reduce_scatter(part, group), group)[: flat.numel()])
    return x


def all_gather(x: Tensor, group: AxisGroup) -> Tensor:
    """Concatenate every member's `x` (equal shapes) on dim 0, in coordinate order."""
    return start_all_gather(x, group).wait()


def reduce_scatter(x: Tensor, group: AxisGroup) -> Tensor:
    """This member's equal dim-0 slice of the sum of every member's `x`."""
    return start_reduce_scatter(x, group).wait()


def _is_direct(x: Tensor, copies: int) -> bool:
    return x.device.type == "cpu" and copies * x.numel() * x.element_size() <= DIRECT_BYTES


def _gather_on_device(x: Tensor, group: AxisGroup, out: Tensor) -> Pending:
    """`all_gather` by the backend, which fills the result in rank order: no copy where that is coordinate order."""
    gathered = out if group.is_sorted else torch.empty_like(out)
    work = dist.all_gather_into_tensor(gathered, x, group=group.process_group, async_op=True)
    pending = Pending.of(work, gathered, x.nbytes)
    if group.is_sorted:
        return pending
    order = list(group.order)
    return pending.then(lambda by_rank: out.copy_(by_rank.unflatten(0, (group.size, -1))[order].flatten(0, 1)))


def _reduce_scatter_on_device(x: Tensor, group: AxisGroup, out: Tensor) -> Pending:
    """`reduce_scatter` by the backend, which deals out slices in rank order: no copy where that is coordinate order."""
    if not group.is_sorted:
        members = sorted(range(group.size), key=lambda member: group.order[member])
        x = x.unflatten(0, (group.size, -1))[members].flatten(0, 1)
    work = dist.reduce_scatter_tensor(out, x, group=group.process_group, async_op=True)
    return Pending.of(work, out, x.nbytes)


def _exchange_and_sum(x: Tensor, group: AxisGroup, out: Tensor) -> Pending:
    """Reduce-scatter by exchange and local sums in `out`'s dtype; the next piece travels while one is summed."""
    table, flat = x.view(group.size, -1), out.view(-1)
    step = max(1, PIECE // group.size)
    pieces = [slice(first, first + step) for first in range(0, table.shape[1], step)]
    if not pieces:
        return Pending(lambda: out)
    arriving = _post([row[pieces[0]] for row in table], group)

    def finish() -> Tensor:
        now = arriving
        for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
            after = None if following is None else _post([row[following] for row in table], group)
            flat[piece].copy_(_sum_as_tree([part.to(out.dtype) for part in now.wait()]))
            now = after
        return out

    return Pending(finish, x.nbytes)


@dataclass(frozen=True)
class _Arriving:
    """What members send each other, under way: keeps the tensors alive until then."""

    works: list[dist.Work]
    sent: list[Tensor]
    received: list[Tensor]

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.received


def _post(parts: list[Tensor], group: AxisGroup, places: list[Tensor] | None = None) -> _Arriving:
    """Send part i to member i; receive what every member sent me, in coordinate order (my own part stands for mine)."""
    others = [i for i in range(group.size) if i != group.index]
    received = list(places) if places is not None else [
        part if i == group.index else torch.empty_like(part) for i, part in enumerate(parts)]
    ops = [dist.P2POp(dist.irecv, received[i], group.ranks[i], group.process_group) for i in others]
    ops += [dist.P2POp(dist.isend, parts[i], group.ranks[i], group.process_group) for i in others]
    # Together, since a backend that queues point-to-point calls would wait for its first receive for ever.
    return _Arriving(dist.batch_isend_irecv(ops), parts, received)


def _sum_as_tree(parts: list[Tensor]) -> Tensor:
    """The sum in coordinate order, in adjacent pairs, then in pairs of those: what is added to what depends on places
    alone, so that every member that computes it gets the same bits, and half as many members with the sums of pairs do.
    """
    while len(parts) > 1:
        pairs = [left + right for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(parts) - len(parts) % 2 :]
    return parts[0]


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


class _TreeReduce(_Reduce):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        return tree_sum(x.clone(), group)


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


def tree_reduce_from(x: Tensor, group: AxisGroup) -> Tensor:
    """`reduce_from` with the order of additions of `tree_sum`; of `reduce_scatter_tokens` it is that on every CPU."""
    return _TreeReduce.apply(x, group) if group.size > 1 else x


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
