"""Weights in the layout of the native products, packed when a product asks and kept only where somebody says for how
long they stay as they are.

Owns the copies. It never finds out by itself whether a weight has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from hybridflow.kernels.native_ops import PackedWeight, pack


class PackedWeights:
    """Packing reads and writes a weight once, which a product with some ten rows takes as long for."""

    def __init__(self) -> None:
        self._kept: dict[Tensor, PackedWeight] | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, whose caller promises that no weight changes before its last product, each is packed once: a second
        copy of the weights until the end. May be nested.
        """
        if self._kept is not None:
            yield
            return
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    @property
    def num_kept(self) -> int:
        return len(self._kept or ())

    def of(self, weight: Tensor) -> PackedWeight:
        """`weight` `[out, in]` as it is now, or as it was when it was first asked for inside of `kept`."""
        if self._kept is None:
            return pack(weight.detach())
        if weight not in self._kept:
            self._kept[weight] = pack(weight.detach())
        return self._kept[weight]
