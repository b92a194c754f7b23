"""A number that ranks raise one at a time, without any of them waiting for another.

Owns the number, in the job's key-value store. What it counts is its users'.
"""

from __future__ import annotations

import torch.distributed as dist


class SharedCount:
    """A count from 0, of all ranks; of this process alone where there is no store. `World.count` makes one."""

    def __init__(self, store: dist.Store | None, key: str) -> None:
        self._store, self._key = store, key
        self._own = 0

    def fetch_add(self, amount: int) -> int:
        """Add `amount`, in one indivisible step; the number before."""
        if self._store is not None:
            return self._store.add(self._key, amount) - amount
        self._own += amount
        return self._own - amount
