"""The blocks of a KV cache: which are free, how many sequences use each, and which unused ones keep their content.

Owns counts and the order in which unused blocks are given up. It never holds keys or values, and knows no sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from hybridflow.generation.prefix_cache import PrefixCache

BLOCK_TOKENS = 16


class BlockPool:
    """Hands blocks out and takes them back. Every block is in use, kept (unused, found in the prefix cache), or free.

    Kept blocks are given up least recently used first, when nothing is free.
    """

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        """`cache` says whose content is worth keeping; the pool tells it what it gives up."""
        self.num_blocks = num_blocks
        self._cache = cache
        self._users = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest first
        self._kept: OrderedDict[int, None] = OrderedDict()  # in the order in which they fell out of use

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_available(self) -> int:
        """How many `take` can give."""
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def is_kept(self, block: int) -> bool:
        """Whether it is available, although its content is known: sharing it makes one fewer available."""
        return block in self._kept

    def take(self) -> int:
        """A block for one user; its content is anything. There must be one available."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            self._cache.forget(block)
        self._users[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more user for each: of blocks in use, or kept."""
        for block in blocks:
            if self._users[block] == 0:
                del self._kept[block]
            self._users[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One user fewer for each block of a sequence, `blocks` in the order of its positions.

        The last ones are given up first: a block is found through the ones before it, never without them.
        """
        for block in reversed(list(blocks)):
            self._users[block] -= 1
            if self._users[block] == 0:
                if self._cache.holds(block):
                    self._kept[block] = None
                else:
                    self._free.append(block)

    def drop_kept(self) -> None:
        """The prefix cache forgets everything: what is unused is free, what is in use will be."""
        self._cache.clear()
        self._free.extend(reversed(self._kept))
        self._kept.clear()
