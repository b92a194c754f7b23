"""A meter of what a forward keeps alive for its backward: storages counted, not estimated.

It sees everything that is held, by whomever: saved tensors, what hooks and closures of recomputation hold, and what an
`autograd.Function` puts on its context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def measure_saved_bytes(fn: Callable[[], Any]) -> int:
    """Bytes of the storages that were made while `fn` ran and live on with what it returns.

    For what a backward needs, `fn` returns the graph and no tensor, as an executor holds it. Parameters and whatever
    else there was before are not counted. Storages made by code that torch does not dispatch are not seen.

    Example: `measure_saved_bytes(lambda: get_gradient_edge(layer(x.clone())))` with the layer's input counted.
    """
    with _NewStorages() as new:
        held = fn()
    found = sum(size for ref, size in new.made.values() if not ref.expired())
    del held
    return found


class _NewStorages(TorchDispatchMode):
    """Weak references and bytes of the storages that operations made, by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        # A weak reference keeps a storage's identity from being used again, so that both sets stay right.
        self.older: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for key, storage in _storages((args, kwargs)):
            if key not in self.made and key not in self.older:
                self.older[key] = StorageWeakRef(storage)
        out = func(*args, **(kwargs or {}))
        for key, storage in _storages(out):
            if key not in self.made and key not in self.older:
                self.made[key] = StorageWeakRef(storage), storage.nbytes()
        return out


def _storages(tree: Any) -> list[tuple[int, torch.UntypedStorage]]:
    storages = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [(storage._cdata, storage) for storage in storages]
