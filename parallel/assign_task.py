"""An assignment in numbers: what ranks have, what coordinates want, and the blocks that can be solved on their own.

Owns the step from shard maps and nodes to arrays of kinds, and the cut into blocks. Solving is `assign_block`'s.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np
from numpy.typing import NDArray

from hybridflow.parallel.cells import find_cells
from hybridflow.parallel.nodes import Nodes
from hybridflow.parallel.shard_map import ShardMap

Ints = NDArray[np.int64]
Group = tuple[int, ...]  # what the members of a tensor group want, in order

# Ranks of a block: beyond, nodes are not kept whole where tensor groups may span them (a matching costs their cube).
MAX_BLOCK = 2048


@dataclass(frozen=True)
class Block:
    """Some ranks (by their place in `train.ranks`) and as many places of the new grid, solved on their own.

    Attributes:
        members, places: both ascending.
        pattern: equal for blocks that have the same solution, in terms of positions in `members` and `places`.
    """

    members: tuple[int, ...]
    places: tuple[int, ...]
    pattern: Hashable


@dataclass(frozen=True)
class Task:
    """What there is to decide, in numbers.

    Attributes:
        has: `[ranks]`, the source kind of each rank.
        wants: `[ranks]`, the destination kind of each place of the new grid.
        node: `[ranks]`, the node of each rank.
        tp: of the new grid, so that places i*tp to (i+1)*tp are a tensor group.
        held: `[source kinds, parts]`, which parts of the model a kind has. A part is all that the same kinds have and
            the same kinds want.
        wanted: `[destination kinds, parts]`.
        numel: `[parts]`.
    """

    has: Ints
    wants: Ints
    node: Ints
    tp: int
    held: NDArray[np.bool_]
    wanted: NDArray[np.bool_]
    numel: Ints

    @classmethod
    def of(cls, src: ShardMap, dst: ShardMap, ranks: Sequence[int], tp: int, nodes: Nodes) -> Task:
        parts: Counter[tuple[frozenset, frozenset]] = Counter()
        for cell in find_cells(src, dst):
            parts[frozenset(cell.holders), frozenset(cell.wanters)] += cell.box.numel
        # A rank outside the source map has nothing: it is of a kind that is in no part.
        of_source = [(src.kind_of(rank),) if rank in src else () for rank in ranks]
        of_dest = [(dst.kind_of(rank),) for rank in ranks]
        held, has = _merged(of_source, [holders for holders, _ in parts])
        wanted, wants = _merged(of_dest, [wanters for _, wanters in parts])
        node = np.array([nodes.of(rank) for rank in ranks])
        return cls(has, wants, node, tp, held, wanted, np.array(list(parts.values()), dtype=np.int64))

    @cached_property
    def received(self) -> Ints:
        """`[source kinds, destination kinds]`: elements that must come over a wire."""
        return ~self.held * self.numel @ self.wanted.T

    @cached_property
    def groups(self) -> list[Group]:
        """What each tensor group of the new grid wants, member by member."""
        return [tuple(group) for group in self.wants.reshape(-1, self.tp).tolist()]

    def blocks(self, whole_nodes: bool) -> Iterator[Block]:
        """All ranks and places in blocks, each of which has every kind in the proportion of the whole.

        A solution of blocks is then one of the whole: were there a better one, its average over the blocks would be a
        better fractional solution of a block, and matchings have none better than the best whole one. Costs that
        depend on a rank's neighbours are no matching; for their sake blocks are whole nodes, and what is best is best
        for each block then.

        Args:
            whole_nodes: whether a node must lie in one block, however large that makes it.
        """
        unit = len(self.has) // gcd(*Counter(self.groups).values())
        places_of = {want: [i for i, group in enumerate(self.groups) if group == want] for want in set(self.groups)}
        taken: Counter[tuple[int, ...]] = Counter()
        for members in self._member_blocks(unit, whole_nodes):
            places = []
            for want, every in places_of.items():
                count = len(every) * len(members) // len(self.has)
                places += every[taken[want]:taken[want] + count]
                taken[want] += count
            flat = tuple(group * self.tp + index for group in sorted(places) for index in range(self.tp))
            at = list(members)
            nodes = np.unique(self.node[at], return_inverse=True)[1]
            pattern = tuple(tuple(numbers.tolist()) for numbers in (self.has[at], self.wants[list(flat)], nodes))
            yield Block(members, flat, pattern)

    def _member_blocks(self, unit: int, whole_nodes: bool) -> Iterator[tuple[int, ...]]:
        """Ranks in blocks that have every kind in proportion, and whole nodes, and whose number `unit` divides."""
        of_kind = [np.flatnonzero(self.has == kind) for kind in range(len(self.held))]
        num_units = gcd(*(len(members) for members in of_kind))
        unit_of = np.empty(len(self.has), dtype=np.int64)
        for members in of_kind:
            unit_of[members] = np.arange(len(members)) * num_units // len(members)
        pending: list[int] = []
        alone = [[unit] for unit in range(num_units)]
        groups = _connected(unit_of, self.node, num_units) if self.node.min() < self.node.max() else alone
        if not whole_nodes and max(map(len, groups)) * len(self.has) > MAX_BLOCK * num_units:
            groups = alone
        for units in groups:
            pending += np.flatnonzero(np.isin(unit_of, units)).tolist()
            if len(pending) % unit == 0:
                yield tuple(sorted(pending))
                pending = []
        assert not pending, (len(self.has), unit)


def _merged(kinds: Sequence[tuple[Hashable, ...]], sets: Sequence[frozenset]) -> tuple[NDArray[np.bool_], Ints]:
    """Kinds that are in the same sets count as one: which sets each is in, and the number of everybody's kind."""
    rows = {kind: tuple(bool(kind) and kind[0] in each for each in sets) for kind in dict.fromkeys(kinds)}
    numbers = {row: number for number, row in enumerate(dict.fromkeys(rows.values()))}
    return np.array(list(numbers), dtype=bool), np.array([numbers[rows[kind]] for kind in kinds])


def _connected(unit_of: Ints, node: Ints, num_units: int) -> list[list[int]]:
    """Units in groups that share no node with each other, in the order of their first unit."""
    root = list(range(num_units))

    def find(unit: int) -> int:
        while root[unit] != unit:
            unit = root[unit]
        return unit

    first: dict[int, int] = {}
    for unit, at in zip(unit_of.tolist(), node.tolist()):
        low, high = sorted((find(unit), find(first.setdefault(at, unit))))
        root[high] = low
    groups: dict[int, list[int]] = defaultdict(list)
    for unit in range(num_units):
        groups[find(unit)].append(unit)
    return list(groups.values())
