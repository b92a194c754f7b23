"""What a layer keeps for its backward: everything, what is dear to compute, or its input alone.

Owns the choice and how dropped tensors are made again. What a layer computes is `decoder`'s, and how many bytes a
choice keeps is `activation_memory`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Recompute(Enum):
    """What is computed once more in backward. Gradients are the same, bit for bit where kernels are deterministic.

    SELECTIVE drops what costs a few passes over memory and no matrix product: outputs of norms (and what sequence
    parallelism gathers of them: the gather is issued again), rotated queries and keys and their layout in rows (and
    what context parallelism gathers of keys and values), and the output of SwiGLU, the widest of all. What matrix
    products and attention made is kept. Korthikanti et al. (arXiv 2205.05198, section 5) drop the scores of attention
    first; a flash kernel never stores them, so that here they are no choice.
    FULL keeps the input of a layer and costs a second forward of it, without the last collective (Chen et al. 2016,
    arXiv 1604.06174).
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


def keep_less(fn: Callable[[Tensor], Tensor], x: Tensor, remake: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """`fn(x)`, of whose intermediate tensors autograd keeps none that `fn` computed on the way to an operation: of each
    operation it keeps `x`, constants, parameters and what the operation itself put out for its backward.

    Args:
        fn: deterministic; it has parameters and constants of its own as it likes. Collectives inside are issued again
            in backward, in the same order on every rank that runs the same `fn`.
        x: must not be changed in place before the backward.
        remake: makes the one dropped tensor from `x`. None: `fn` runs again as far as to the last dropped tensor, which
            for torch's own operations is before the operation itself is run, and for a custom function after it.
    """
    made = _Remade(fn, x, remake)
    with saved_tensors_hooks(made.pack, made.unpack):
        out = fn(x)
    made.seen.clear()
    return out


@dataclass(frozen=True)
class _Dropped:
    """A view of dropped storage number `number`."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Enough(Exception):
    """Ends a second run once it has made what was dropped."""


class _Remade:
    """The dropped tensors of one call of `keep_less`, by distinct storage in the order in which they were first saved.
    """

    def __init__(self, fn: Callable[[Tensor], Tensor], x: Tensor, remake: Callable[[Tensor], Tensor] | None) -> None:
        self.fn, self.remake = fn, remake
        self.x, self.version = x.detach(), x._version
        # While `fn` runs the dropped tensors stay alive, so that no two of them have the same address.
        self.seen: list[Tensor] = []
        self.uses: Counter[int] = Counter()  # by storage number: how often it was saved
        self.ready: list[Tensor | None] = []
        self.left: Counter[int] = Counter()

    def pack(self, tensor: Tensor) -> Tensor | _Dropped:
        if not self._is_dropped(tensor):
            # Without its history: an operation that holds its own output would never be freed.
            return tensor if tensor.grad_fn is None else tensor.detach()
        number = _number(tensor, self.seen)
        self.uses[number] += 1
        return _Dropped(number, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Tensor | _Dropped) -> Tensor:
        """A dropped tensor, made again where it is the first to be asked for, and let go with its last use."""
        if isinstance(packed, Tensor):
            return packed
        if self.left[packed.number] == 0:
            assert self.x._version == self.version, "the input of a recomputation was changed in place"
            self.ready, self.left = list(self._make()), self.uses.copy()
            assert len(self.ready) == len(self.uses), (len(self.ready), len(self.uses))
        made = self.ready[packed.number]
        assert made is not None
        self.left[packed.number] -= 1
        if self.left[packed.number] == 0:
            self.ready[packed.number] = None
        return made.as_strided(packed.size, packed.stride, packed.offset)

    def _is_dropped(self, tensor: Tensor) -> bool:
        """Whether `fn` computed it before the operation that saves it, and it is not `x` seen otherwise."""
        if tensor.grad_fn is None or _address(tensor) == _address(self.x):
            return False
        # An operation makes its node, then saves: what it puts out itself has the newest node.
        if tensor.grad_fn._sequence_nr() == torch.autograd._get_sequence_nr() - 1:
            return False
        is_parameter = tensor._is_view() and tensor._base.is_leaf and tensor._base.requires_grad  # its transpose, say
        return not is_parameter

    def _make(self) -> list[Tensor]:
        if self.remake is not None:
            with torch.no_grad():
                return [self.remake(self.x)]
        found: list[Tensor] = []

        def collect(tensor: Tensor) -> None:
            if self._is_dropped(tensor):
                _number(tensor, found)
            if len(found) == len(self.uses):
                raise _Enough

        def never(_: None) -> Tensor:
            raise AssertionError("nobody differentiates a second run")

        try:
            with torch.enable_grad(), saved_tensors_hooks(collect, never):
                self.fn(self.x.detach().requires_grad_())
        except _Enough:
            pass
        made = [tensor.detach() for tensor in found]
        found.clear()  # the second graph holds `collect`, which holds `found`: that would keep all of it for ever
        return made


def _number(tensor: Tensor, known: list[Tensor]) -> int:
    """The place of the tensor's storage among those of `known`, at whose end it is put where it is new."""
    for number, other in enumerate(known):
        if _address(other) == _address(tensor):
            return number
    known.append(tensor)
    return len(known) - 1


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
