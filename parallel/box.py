"""Boxes: regions of canonical tensors, and the integer geometry on them. Everything that is moved is a set of boxes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import Tensor


@dataclass(frozen=True, order=True)
class Box:
    """A half-open region `[lo, hi)` of the canonical tensor `name` (its Hugging Face name and full shape).

    Example: rows 4 to 8 of an 8 x 6 matrix are `Box("w", (4, 0), (8, 6))`, with shape (4, 6).
    """

    name: str
    lo: tuple[int, ...]
    hi: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> Box:
        return cls(name, (0,) * len(shape), tuple(shape))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(hi - lo for lo, hi in zip(self.lo, self.hi))

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that cuts this box out of the full tensor."""
        return tuple(slice(lo, hi) for lo, hi in zip(self.lo, self.hi))

    def intersect(self, other: Box) -> Box | None:
        """The common region, None where there is none."""
        if self.name != other.name:
            return None
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        return Box(self.name, lo, hi) if all(a < b for a, b in zip(lo, hi)) else None

    def subtract(self, other: Box) -> list[Box]:
        """This box without `other`, as at most 2 x ndim disjoint boxes."""
        common = self.intersect(other)
        if common is None:
            return [self]
        rest, lo, hi = [], list(self.lo), list(self.hi)
        for dim in range(len(lo)):
            if lo[dim] < common.lo[dim]:
                rest.append(Box(self.name, tuple(lo), (*hi[:dim], common.lo[dim], *hi[dim + 1:])))
            if common.hi[dim] < hi[dim]:
                rest.append(Box(self.name, (*lo[:dim], common.hi[dim], *lo[dim + 1:]), tuple(hi)))
            lo[dim], hi[dim] = common.lo[dim], common.hi[dim]
        return rest

    def cut(self, max_numel: int) -> list[Box]:
        """This box as consecutive pieces of at most `max_numel` elements, cut along the outermost dims that need it."""
        if self.numel <= max_numel:
            return [self]
        dim = next(d for d, size in enumerate(self.shape) if size > 1)
        step = max(1, max_numel // prod(self.shape[dim + 1:]))
        pieces = []
        for start in range(self.lo[dim], self.hi[dim], step):
            lo = (*self.lo[:dim], start, *self.lo[dim + 1:])
            hi = (*self.hi[:dim], min(start + step, self.hi[dim]), *self.hi[dim + 1:])
            pieces += Box(self.name, lo, hi).cut(max_numel)
        return pieces


@dataclass(frozen=True)
class Shard:
    """A box and where one rank keeps it: a strided view, in elements, of the contiguous tensor `storage`."""

    box: Box
    storage: str
    offset: int
    strides: tuple[int, ...]

    @classmethod
    def of_rows(cls, box: Box, storage: str, row_start: int = 0) -> Shard:
        """A box kept as whole consecutive rows, from `row_start`, of a storage with the box's trailing shape."""
        strides = tuple(prod(box.shape[dim + 1:]) for dim in range(len(box.shape)))
        return cls(box, storage, row_start * strides[0], strides)

    def view(self, storages: Mapping[str, Tensor], part: Box | None = None) -> Tensor:
        """The local tensor that holds the box, or `part` of it (which must lie inside)."""
        part = part or self.box
        storage = storages[self.storage]
        return storage.as_strided(part.shape, self.strides, storage.storage_offset() + self.offset_of(part))

    def offset_of(self, part: Box) -> int:
        """Where in the storage the first element of `part` is, which must lie inside."""
        return self.offset + sum((p - b) * s for p, b, s in zip(part.lo, self.box.lo, self.strides))

    def end_of(self, part: Box) -> int:
        """One after the last element of `part` in the storage."""
        return self.offset_of(part) + 1 + sum((size - 1) * stride for size, stride in zip(part.shape, self.strides))

    def is_contiguous(self, part: Box) -> bool:
        """Whether `part`, which must lie inside, is one stretch of the storage in row-major order."""
        expected = 1
        for size, stride in zip(reversed(part.shape), reversed(self.strides)):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True
