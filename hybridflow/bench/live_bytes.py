"""A meter of the memory that some code has at its peak: the storages alive at once among those that it makes.

Counts storages as they are, on any device and whoever holds them: autograd, an executor, a message on its way. Those on
the meta device are none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`peak` is the most bytes alive at once of the storages made inside, where every operation is seen.

    Example: `with LiveBytes() as live: step()`, then `live.peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._tracked = 0  # bytes of `_made`, some of them gone already
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        # A weak reference keeps a storage's identity from being used again, so that both sets stay right.
        self._older: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for key, storage in _storages((args, kwargs)):
            if key not in self._made and key not in self._older:
                self._older[key] = StorageWeakRef(storage)
        out = func(*args, **(kwargs or {}))
        new = [(key, storage) for key, storage in _storages(out) if key not in self._made and key not in self._older]
        for key, storage in new:
            self._made[key] = StorageWeakRef(storage), storage.nbytes()
            self._tracked += storage.nbytes()
        if self._tracked > self.peak:
            self._forget_gone()
            self.peak = max(self.peak, self._tracked)
        return out

    @property
    def now(self) -> int:
        """Bytes of the storages made inside that are still alive, also after it has ended."""
        self._forget_gone()
        return self._tracked

    def _forget_gone(self) -> None:
        self._made = {key: (ref, size) for key, (ref, size) in self._made.items() if not ref.expired()}
        self._tracked = sum(size for _, size in self._made.values())


def _storages(tree: Any) -> list[tuple[int, torch.UntypedStorage]]:
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tree)
                if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
    return [(storage._cdata, storage) for storage in storages]
