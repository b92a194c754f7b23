"""Counting torch's operations, also those of backwards."""

from __future__ import annotations

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """How often each operation ran inside, by name. Example: `with Operations() as ran: step()`, `ran.count["mm"]`."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
