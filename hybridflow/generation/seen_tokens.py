"""Which tokens each running sequence has had, in its prompt and its response: what a repetition penalty asks about.

Owns the table on the device. What a penalty does is `sampling`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SeenTokens:
    """One byte for every slot and token: 256 slots of 152k tokens take 39 MB.

    Example: `seen.begin(3, (5, 9)); seen.add(tensor([3]), tensor([7])); seen.of(tensor([3]))` is true at 5, 7 and 9.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._seen = torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device)

    def begin(self, slot: int, ids: Sequence[int]) -> None:
        """A sequence with the tokens `ids` takes `slot`; what was there is forgotten."""
        self._seen[slot] = False
        self._seen[slot, torch.tensor(ids, dtype=torch.int64).to(self._seen.device, non_blocking=True)] = True

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """Each of `slots` int64 `[rows]` has one more token, of `tokens` int64 `[rows]`."""
        self._seen[slots, tokens] = True

    def of(self, slots: Tensor) -> Tensor:
        """bool `[rows, vocab]` of `slots` int64 `[rows]`."""
        return self._seen[slots]
