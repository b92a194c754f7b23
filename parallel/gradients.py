"""Main gradients: where every backward of an optimizer step adds up, in fp32 at least.

Owns the flat buffers of parameters and gradients, the hooks that fill them, and their one reduction after the last
backward. It never divides (losses carry their global weights, so every reduction is a sum) and never steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridflow.parallel.collectives import all_gather, all_reduce, reduce_scatter
from hybridflow.parallel.mesh import AxisGroup

ALIGNMENT = 32  # elements: every shard starts on a 128-byte line in fp32
PIECE = 1 << 24  # elements of a bucket in one collective that needs a copy: bounds the extra memory to some 64 MiB


@dataclass(frozen=True)
class GradSync:
    """What one parameter's gradient needs besides the sum over data-parallel ranks.

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
    start: int
    end: int
    counted: bool


class Bucket:
    """Parameters of one dtype that share weight decay and reductions, flat, with their gradients.

    One bucket for each kind keeps its layout equal on all ranks that hold copies of its parameters. Sums then run in
    the same order on each of them, and copies stay equal bit for bit.

    Attributes:
        params: `[size]` in the parameters' dtype; the parameters are views of it.
        grads: `[size]` in fp32 (fp64 for fp64 parameters).
        decay: whether weight decay applies (matrices only, as in Megatron-LM).
        start, end: the elements whose reduced gradient this rank has: its equal share of the data-parallel group, or
            everything where gradients are not sharded.
    """

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], syncs: Mapping[str, GradSync], decay: bool, dp: AxisGroup,
        shard_over_dp: bool,
    ) -> None:
        first = named[0][1]
        self.decay = decay
        self.groups = syncs[named[0][0]].groups
        self.slots = _place(named, syncs)
        size = _round_up(self.slots[-1].end, dp.size * ALIGNMENT)
        self.params = torch.zeros(size, dtype=first.dtype, device=first.device)
        grad_dtype = torch.promote_types(first.dtype, torch.float32)
        self.grads = torch.zeros(size, dtype=grad_dtype, device=first.device)
        share = size // dp.size
        self.start, self.end = (dp.index * share, (dp.index + 1) * share) if shard_over_dp else (0, size)
        for slot, (_, param) in zip(self.slots, named, strict=True):
            self._adopt(slot, param)

    def _adopt(self, slot: Slot, param: nn.Parameter) -> None:
        """Make `param` a view of the buffer, and have each of its gradients added to the main gradient and freed."""
        view = self.params[slot.start : slot.end].view(param.shape)
        view.copy_(param.data)
        param.data = view
        main_grad = self.grads[slot.start : slot.end].view(param.shape)

        def accumulate(ready: Tensor) -> None:
            assert ready.grad is not None
            main_grad.add_(ready.grad)
            ready.grad = None

        param.register_post_accumulate_grad_hook(accumulate)

    @property
    def my_grads(self) -> Tensor:
        """This rank's share of the gradients, as a view."""
        return self.grads[self.start : self.end]

    @property
    def my_params(self) -> Tensor:
        """The parameters of this rank's share, as a view."""
        return self.params[self.start : self.end]

    def reduce_over(self, dp: AxisGroup, sharded: bool) -> None:
        """Sum the gradients over `dp`: everything in place, or each rank its own share."""
        if not sharded:
            all_reduce(self.grads, dp)
            return
        for piece in self._pieces(dp):
            self.my_grads[piece].copy_(reduce_scatter(self.grads.view(dp.size, -1)[:, piece].flatten(), dp))

    def gather_params(self, dp: AxisGroup) -> None:
        """Give every rank of `dp` the parameters of every share."""
        for piece in self._pieces(dp):
            self.params.view(dp.size, -1)[:, piece] = all_gather(self.my_params[piece], dp).view(dp.size, -1)

    def _pieces(self, dp: AxisGroup) -> list[slice]:
        share, step = self.end - self.start, max(1, PIECE // dp.size)
        return [slice(first, min(first + step, share)) for first in range(0, share, step)]

    def counted_ranges(self) -> list[tuple[int, int]]:
        """Ranges of `my_grads` that this rank counts in the norm, neighbours merged (padding between them is zero)."""
        ranges: list[tuple[int, int]] = []
        previous_counted = False
        for slot in self.slots:
            start, end = max(slot.start, self.start) - self.start, min(slot.end, self.end) - self.start
            if slot.counted and start < end:
                ranges.append((ranges.pop()[0], end) if previous_counted and ranges else (start, end))
            previous_counted = slot.counted
        return ranges


class MainGrads:
    """The main gradients of one model's parameters on this rank.

    Making it moves the parameters into flat buffers (their values and names stay; `named_parameters` gives views).
    From then on every backward adds into `grads` and leaves `param.grad` None. The order of a step is:
    backwards, `reduce()` once, optimizer step, `zero()`.

    Args:
        module: this rank's stage; parameters that do not require gradients are left alone.
        syncs: by parameter name; parameters without an entry are `SHARDED`.
        dp: the data-parallel group.
        zero_stage: 0: every rank has all reduced gradients; 1: each has its share, and the optimizer state of it.
    Raises:
        ValueError: a zero_stage that is neither, or a sync that names no parameter.
    """

    def __init__(self, module: nn.Module, syncs: Mapping[str, GradSync], dp: AxisGroup, zero_stage: int = 0) -> None:
        if zero_stage not in (0, 1):
            raise ValueError(f"zero_stage {zero_stage} must be 0 (reduce all) or 1 (shard gradients and optimizer)")
        named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        unknown = syncs.keys() - {name for name, _ in module.named_parameters()}
        if unknown:
            raise ValueError(f"gradient syncs name no parameter of the stage: {sorted(unknown)}")
        self.dp = dp
        self.sharded = zero_stage == 1 and dp.size > 1
        all_syncs = {name: syncs[name] if name in syncs else SHARDED for name, _ in named}
        self.buckets = [
            Bucket(members, all_syncs, decay, dp, self.sharded)
            for (decay, *_), members in _by_kind(named, all_syncs).items()
        ]
        self.reduced_bytes = 0
        self._is_reduced = False

    def reduce(self) -> None:
        """Sum the gradients over data-parallel ranks and over each parameter's own groups. Collective, once a step.

        Adds the bytes that this rank put into collectives to `reduced_bytes`.
        """
        assert not self._is_reduced, "gradients are reduced once a step: call zero() first"
        self._is_reduced = True
        for bucket in self.buckets:
            bucket.reduce_over(self.dp, self.sharded)
            self._count(bucket.grads, self.dp)
            for group in bucket.groups:
                all_reduce(bucket.my_grads, group)
                self._count(bucket.my_grads, group)

    def zero(self) -> None:
        """Forget all gradients."""
        for bucket in self.buckets:
            bucket.grads.zero_()
        self._is_reduced = False

    def _count(self, x: Tensor, group: AxisGroup) -> None:
        if group.size > 1:
            self.reduced_bytes += x.numel() * x.element_size()


_Kind = tuple[bool, bool, torch.dtype, tuple[tuple[int, ...], ...]]


def _by_kind(
    named: list[tuple[str, nn.Parameter]], syncs: Mapping[str, GradSync]
) -> dict[_Kind, list[tuple[str, nn.Parameter]]]:
    """Parameters by (weight decay, one row, dtype, ranks of the extra sums); matrices first, else in module order.

    Matrices of one row (value, score heads) are copies on every tensor rank, while the sizes of matrices cut over the
    vocabulary differ between ranks: they do not share a bucket.
    """
    kinds: dict[_Kind, list[tuple[str, nn.Parameter]]] = {}
    for name, param in sorted(named, key=lambda item: item[1].dim() < 2):
        ranks = tuple(group.ranks for group in syncs[name].groups if group.size > 1)
        kinds.setdefault((param.dim() >= 2, param.shape[0] == 1, param.dtype, ranks), []).append((name, param))
    return kinds


def _place(named: list[tuple[str, nn.Parameter]], syncs: Mapping[str, GradSync]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    for name, param in named:
        start = _round_up(slots[-1].end, ALIGNMENT) if slots else 0
        slots.append(Slot(name, start, start + param.numel(), syncs[name].counted))
    return tuple(slots)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
