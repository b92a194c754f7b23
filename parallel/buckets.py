"""Buckets: flat memory of parameters and of their gradients, and which parameter lies where.

Owns the layout and the memory. It never communicates and never decides when a gradient is complete (`gradients` does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridflow.parallel.arithmetic import round_up
from hybridflow.parallel.mesh import AxisGroup

ALIGNMENT = 32  # elements: every shard starts on a 128-byte line in fp32


@dataclass(frozen=True)
class GradSync:
    """What one parameter's gradient needs besides the sum over the ranks that hold the same weights.

    Attributes:
        groups: its gradient is summed over each of these too: tp for norms under sequence parallelism and for q/k
            norms, the block of ranks that replicate a key-value head, the first and last stage for tied embeddings.
            All ranks of such a group list the same parameters, in the same order, with the same shapes.
        counted: whether this rank counts it in the gradient norm; exactly one of the ranks that hold a copy does.
    Example: `GradSync(groups=(mesh.tp,), counted=mesh.tp.index == 0)` for a norm under sequence parallelism.
    """

    groups: tuple[AxisGroup, ...] = ()
    counted: bool = True


SHARDED = GradSync()  # a parameter of which every rank of the replica holds a different part


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in its bucket: elements `[start, end)`. Unused elements are alignment."""

    name: str
    shape: torch.Size
    start: int
    end: int
    counted: bool


class Bucket:
    """Some parameters of one kind, flat, with their gradients: what is reduced and stepped as one.

    A bucket never mixes kinds, which keeps its layout equal on all ranks that hold copies of its parameters. Sums then
    run in the same order on each of them, and copies stay equal bit for bit.

    Attributes:
        chunk: the virtual stage that its parameters belong to.
        decay: whether weight decay applies (matrices only, as in Megatron-LM).
        groups: of the extra sums that all of its parameters need.
        slots: in the order in which a backward completes them.
        params: `[size]` in the parameters' dtype; the parameters are views of it.
        start, end: the elements whose reduced gradient this rank has: its equal share of the data group, or everything
            where gradients are not sharded.
        share: `[end - start]` reduced gradients in fp32 (fp64 for fp64 parameters). A part of `grads`, unless that
            is freed between steps.
    """

    def __init__(self, kind: BucketKind, members: Sequence[Member], data: AxisGroup, zero_stage: int) -> None:
        first = members[0]
        self.chunk, self.decay, self.groups = kind.chunk, kind.decay, first.sync.groups
        self.slots = _place(members)
        size = round_up(self.slots[-1].end, data.size * ALIGNMENT)
        device = first.param.device
        self.params = torch.zeros(size, dtype=kind.dtype, device=device)
        self.grad_dtype = torch.promote_types(kind.dtype, torch.float32)
        self.sharded = zero_stage > 0 and data.size > 1
        self._frees_grads = self.sharded and zero_stage == 2
        self._is_freed = False
        share = size // data.size
        self.start, self.end = (data.index * share, (data.index + 1) * share) if self.sharded else (0, size)
        self._grads = None if self._frees_grads else self._new_grads(size)
        self.share = self._new_grads(share) if self._grads is None else self._grads[self.start : self.end]
        for slot, member in zip(self.slots, members, strict=True):
            self._adopt(slot, member.param)

    @property
    def size(self) -> int:
        return self.params.numel()

    @property
    def grads(self) -> Tensor:
        """`[size]` gradients of the backwards so far. Where they are freed once reduced, only the share is left."""
        assert not self._is_freed, "these gradients were reduced: only the share is kept, until the next step"
        if self._grads is None:
            self._grads = self._new_grads(self.size)
        return self._grads

    @property
    def my_params(self) -> Tensor:
        """The parameters of this rank's share, as a view."""
        return self.params[self.start : self.end]

    @property
    def grad_nbytes(self) -> int:
        """Bytes of gradients held at this moment."""
        full = 0 if self._grads is None else self._grads.nbytes
        return full + (self.share.nbytes if self._frees_grads else 0)

    def main_grad(self, slot: Slot) -> Tensor:
        """The gradient of one parameter so far, as a view in its shape."""
        return self.grads[slot.start : slot.end].view(slot.shape)

    def settle(self, reduced: Tensor) -> None:
        """Take the reduced share, and free the full gradients where only the share is kept."""
        if reduced.data_ptr() != self.share.data_ptr():
            self.share.copy_(reduced)
        if self._frees_grads:
            self._grads = None
            self._is_freed = True

    def clear(self) -> None:
        """Forget the gradients."""
        self._is_freed = False
        if self._frees_grads:
            self._grads = None
        else:
            self.grads.zero_()

    def counted_ranges(self, counted: bool = True) -> list[tuple[int, int]]:
        """Ranges of `share` that this rank counts in the norm (or does not), neighbours merged over the alignment
        between them, whose gradient is zero.
        """
        ranges: list[tuple[int, int]] = []
        previous = False
        for slot in self.slots:
            start, end = max(slot.start, self.start) - self.start, min(slot.end, self.end) - self.start
            if slot.counted is counted and start < end:
                ranges.append((ranges.pop()[0], end) if previous and ranges else (start, end))
            previous = slot.counted is counted
        return ranges

    def _new_grads(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=self.grad_dtype, device=self.params.device)

    def _adopt(self, slot: Slot, param: nn.Parameter) -> None:
        """Make `param` a view of the buffer."""
        view = self.params[slot.start : slot.end].view(slot.shape)
        view.copy_(param.data)
        param.data = view


@dataclass(frozen=True)
class BucketKind:
    """What parameters of one bucket have in common.

    Matrices of one row (value, score heads) are copies on every tensor rank, while the sizes of matrices cut over the
    vocabulary differ between ranks: they do not share a bucket.
    """

    chunk: int
    decay: bool
    one_row: bool
    dtype: torch.dtype
    ranks: tuple[tuple[int, ...], ...]  # of the extra sums


@dataclass(frozen=True)
class Member:
    """A parameter on its way into a bucket; `place` counts in the order in which a backward completes them."""

    place: int
    name: str
    param: nn.Parameter
    sync: GradSync

    def kind(self, chunk: int) -> BucketKind:
        ranks = tuple(group.ranks for group in self.sync.groups if group.size > 1)
        return BucketKind(chunk, self.param.dim() >= 2, self.param.shape[0] == 1, self.param.dtype, ranks)

    @property
    def grad_nbytes(self) -> int:
        return self.param.numel() * torch.promote_types(self.param.dtype, torch.float32).itemsize


def make_buckets(named: Sequence[tuple[str, nn.Parameter]], syncs: Mapping[str, GradSync], data: AxisGroup,
                 zero_stage: int, chunk_of: Callable[[str], int], bucket_bytes: int | None) -> list[Bucket]:
    """Deal parameters, in module order, to buckets in the order in which backward completes these.

    That is chunks from last to first and parameters from last to first; a bucket is complete with its last parameter.
    A bucket is closed when the next parameter would take its gradients over `bucket_bytes` (None: never).
    """
    kinds: dict[BucketKind, list[Member]] = {}
    for place, (name, param) in enumerate(reversed(named)):
        member = Member(place, name, param, syncs[name])
        kinds.setdefault(member.kind(chunk_of(name)), []).append(member)
    parts = [(kind, part) for kind, members in kinds.items() for part in _cut(members, bucket_bytes)]
    parts.sort(key=lambda part: (-part[0].chunk, part[1][-1].place))
    return [Bucket(kind, part, data, zero_stage) for kind, part in parts]


def _cut(members: list[Member], bucket_bytes: int | None) -> list[list[Member]]:
    if bucket_bytes is None:
        return [members]
    parts: list[list[Member]] = []
    room = 0
    for member in members:
        if not parts or member.grad_nbytes > room:
            parts.append([])
            room = bucket_bytes
        parts[-1].append(member)
        room -= member.grad_nbytes
    return parts


def _place(members: Sequence[Member]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    for member in members:
        start = round_up(slots[-1].end, ALIGNMENT) if slots else 0
        slots.append(Slot(member.name, member.param.shape, start, start + member.param.numel(), member.sync.counted))
    return tuple(slots)
