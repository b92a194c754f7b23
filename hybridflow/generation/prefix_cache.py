"""Finds the block that already holds the keys and values of given tokens behind a given prefix.

Owns a tree of full blocks, by content. It never decides how long a block lives: the pool of blocks does.
"""

from __future__ import annotations

ROOT = 0  # what stands before the first token of any sequence


class PrefixCache:
    """A block's content depends on its own tokens and on all before it; both together are a node of a tree.

    Nodes are numbered once and for all: the children of a node whose block was given up are never found again, even
    if another block later holds the same tokens (they age, and are given up in their turn). Keys are compared as
    tokens, not as hashes, so two contents are never confused.
    """

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # (parent, tokens) -> node, block
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}  # of each block
        self._num_nodes = 1

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, parent: int, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        """The node of `tokens` behind `parent`, and its block; None where no block holds them."""
        return self._nodes.get((parent, tokens))

    def register(self, parent: int, tokens: tuple[int, ...], block: int) -> int:
        """`block` holds `tokens` behind `parent`; returns their node. A content keeps its first block."""
        key = (parent, tokens)
        known = self._nodes.get(key)
        if known is not None:
            return known[0]
        node = self._num_nodes
        self._num_nodes += 1
        self._nodes[key] = (node, block)
        self._keys[block] = key
        return node

    def holds(self, block: int) -> bool:
        """Whether `block` can be found."""
        return block in self._keys

    def forget(self, block: int) -> None:
        """`block` is about to hold something else."""
        del self._nodes[self._keys.pop(block)]

    def clear(self) -> None:
        self._nodes.clear()
        self._keys.clear()
