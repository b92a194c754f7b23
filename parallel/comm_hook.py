"""Communication hooks: how one bucket's gradients are summed over the ranks that hold the same weights.

Owns the interface, in the spirit of torch's DDP communication hooks, and the ordinary hooks: plain sums, and sums that
travel in 16 bits. It never decides when a bucket is reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridflow.parallel.collectives import Pending, start_all_gather, start_all_reduce, start_reduce_scatter
from hybridflow.parallel.mesh import AxisGroup


@dataclass(frozen=True)
class GradBucket:
    """One bucket as its hook sees it.

    Attributes:
        index: of the bucket, in the order of their reductions.
        grads: `[size]` this rank's gradients, summed over its micro-batches, fp32 (fp64 for fp64 parameters). A hook
            may overwrite them.
        share: `[size / group.size]` where sharded, else `[size]`: where the reduced gradients are kept. A part of
            `grads` or memory of its own.
        group: the ranks to sum over, at least two.
        sharded: whether each rank gets its own share of the sum (member i elements `[i, i + 1) * size / group.size`),
            or every rank all of it.
    """

    index: int
    grads: Tensor
    share: Tensor
    group: AxisGroup
    sharded: bool


class CommHook(Protocol):
    """Starts the reduction of one bucket and gives a handle on it.

    The handle's `wait()` gives the sum (never the mean) in the shape of `share`, in any dtype, which is copied to
    `share` unless it already is that memory; its `nbytes` are counted as reduced. Handles compose by `then`. A hook is
    called once for each bucket and optimizer step, in the same order on all ranks of the group, possibly inside a
    backward; handles are waited for in the order of the calls. What it raises ends the step.

    Without shards every rank must get the same bits, or weights drift apart.

    Example, gradients halved before their sum:
        >>> def halved(bucket: GradBucket) -> Pending:
        ...     bucket.grads.mul_(0.5)
        ...     return plain(bucket)
    """

    def __call__(self, bucket: GradBucket) -> Pending: ...


def plain(bucket: GradBucket) -> Pending:
    """The sum in the dtype of the gradients."""
    if bucket.sharded:
        return start_reduce_scatter(bucket.grads, bucket.group, out=bucket.share)
    return start_all_reduce(bucket.grads, bucket.group)


@dataclass(frozen=True)
class Compressed:
    """The sum of gradients rounded to `dtype` for the wire; the sum itself is in the dtype of the gradients.

    Every member's part is rounded once, its own too, so that a sum does not depend on who makes it. Without shards the
    sums are rounded once more on their way back. Relative error of a part in bf16: 2^-9.
    """

    dtype: torch.dtype = torch.bfloat16

    def __call__(self, bucket: GradBucket) -> Pending:
        rounded = bucket.grads.to(self.dtype)
        if bucket.sharded:
            return start_reduce_scatter(rounded, bucket.group, out=bucket.share)
        mine = bucket.grads.chunk(bucket.group.size)[bucket.group.index]
        summed = start_reduce_scatter(rounded, bucket.group, out=mine)
        # Only `nbytes` of the first half are counted, as those of an all-reduce are once.
        return summed.then(lambda part: start_all_gather(part.to(self.dtype), bucket.group).wait())


@dataclass(frozen=True)
class DdpHook:
    """A hook written for torch's DDP, `hook(state, bucket) -> Future` of the averaged buffer, as a hook of ours.

    It sees the bucket's `buffer()` and `index()`: enough for torch's `default_hooks`, not for PowerSGD, which asks for
    each parameter's gradient. Every rank gets all of the buffer first, so shards save no traffic. Counted are the bytes
    before any compression.

    Example: `DdpHook(default_hooks.fp16_compress_hook, mesh.data.process_group)`.
    """

    hook: Callable[[Any, Any], torch.futures.Future]
    state: object

    def __call__(self, bucket: GradBucket) -> Pending:
        future = self.hook(self.state, _DdpBucket(bucket))

        def finish() -> Tensor:
            value = future.wait()
            total = (value[0] if isinstance(value, list) else value) * bucket.group.size
            return total.chunk(bucket.group.size)[bucket.group.index] if bucket.sharded else total

        return Pending(finish, bucket.grads.nbytes)


class _DdpBucket:
    """A bucket as DDP shows it to its hooks."""

    def __init__(self, bucket: GradBucket) -> None:
        self._bucket = bucket

    def buffer(self) -> Tensor:
        return self._bucket.grads

    def index(self) -> int:
        return self._bucket.index


def hook_for(reduce_dtype: torch.dtype | None) -> CommHook:
    """The hook that sends gradients in `reduce_dtype` (None: in their own)."""
    return plain if reduce_dtype is None else Compressed(reduce_dtype)
