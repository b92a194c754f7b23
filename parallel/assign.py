"""Which rank takes which coordinate of another layout, so that the fewest bytes must move.

Owns the choice (HybridFlow, arXiv 2409.19256, section 5.3, gives one for special cases). Pure metadata, the same on
every rank; it never plans a copy and knows no model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from math import gcd

import numpy as np
from numpy.typing import NDArray

from hybridflow.parallel.cells import find_cells
from hybridflow.parallel.matching import best_choices, best_matching
from hybridflow.parallel.mesh import Grid, Layout
from hybridflow.parallel.nodes import ONE_NODE, Nodes
from hybridflow.parallel.shard_map import ShardMap

Ints = NDArray[np.int64]


def assign(src: ShardMap, train: Grid, layout: Layout, dst_map: Callable[[Grid], ShardMap], *,
           nodes: Nodes = ONE_NODE, tp_within_node: bool = False) -> Grid:
    """The grid of `layout` on the ranks of `train` that has the fewest bytes to move, whatever the order of its ranks.

    Args:
        src: what each rank has.
        train: whose ranks take part; where nothing else decides, ranks are taken in its order.
        dst_map: what each rank of a grid of `layout` must have. It is asked about one grid only: in another order of
            the ranks, each coordinate must want the same.
        nodes: which ranks are near each other.
        tp_within_node: whether every tensor group of `layout` must lie in one node.
    Raises:
        ValueError: layout and train have unequally many ranks, a tensor group fits no node, or canonical shapes differ.
    Example: train tp4, generate tp2 dp2: tensor groups (0, 2) and (1, 3), and each rank receives a quarter of the model
        (in plain order, half of the ranks receive half of it).
    """
    if layout.size != len(train.ranks):
        raise ValueError(f"layout {layout} is for {layout.size} ranks, but {len(train.ranks)} take part: "
                         "the product of its degrees must be that number")
    if tp_within_node:
        _require_fitting_nodes(train.ranks, layout.tp, nodes)
    task = _Task.of(src, dst_map(Grid(layout, train.ranks)), train.ranks, layout.tp, nodes)
    solve = _solve_by_node if tp_within_node and nodes.ranks_per_node else _solve
    order: list[int] = [-1] * layout.size
    solved: dict[Hashable, list[int]] = {}
    for block in task.blocks():
        if block.pattern not in solved:
            solved[block.pattern] = solve(task, block)
        for place, member in zip(block.places, solved[block.pattern]):
            order[place] = train.ranks[block.members[member]]
    return Grid(layout, tuple(order))


def _require_fitting_nodes(ranks: Sequence[int], tp: int, nodes: Nodes) -> None:
    for node, size in sorted(Counter(nodes.of(rank) for rank in ranks).items()):
        if size % tp:
            fitting = [degree for degree in range(1, size + 1) if size % degree == 0]
            nearest = min(fitting, key=lambda degree: (abs(degree - tp), degree))
            raise ValueError(f"tp {tp} does not fit into nodes: {size} of node {node}'s ranks take part "
                             f"({nodes.ranks_per_node or 'all'} ranks per node) and {tp} does not divide {size}: "
                             f"use tp {nearest}, or let tensor groups span nodes")


@dataclass(frozen=True)
class _Block:
    """Some ranks (by their place in `train.ranks`) and as many places of the new grid, solved on their own.

    Attributes:
        members, places: both ascending.
        pattern: equal for blocks that have the same solution, in terms of positions in `members` and `places`.
    """

    members: tuple[int, ...]
    places: tuple[int, ...]
    pattern: Hashable


@dataclass(frozen=True)
class _Task:
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
    def of(cls, src: ShardMap, dst: ShardMap, ranks: Sequence[int], tp: int, nodes: Nodes) -> _Task:
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
    def groups(self) -> list[tuple[int, ...]]:
        """What each tensor group of the new grid wants, member by member."""
        return [tuple(group) for group in self.wants.reshape(-1, self.tp).tolist()]

    def blocks(self) -> Iterator[_Block]:
        """All ranks and places in blocks, each of which has every kind in the proportion of the whole.

        A solution of blocks is then one of the whole: were there a better one, its average over the blocks would be a
        better fractional solution of a block, and matchings have none better than the best whole one.
        """
        unit = len(self.has) // gcd(*Counter(self.groups).values())
        places_of = {want: [i for i, group in enumerate(self.groups) if group == want] for want in set(self.groups)}
        taken: Counter[tuple[int, ...]] = Counter()
        for members in self._member_blocks(unit):
            places = []
            for want, every in places_of.items():
                count = len(every) * len(members) // len(self.has)
                places += every[taken[want]:taken[want] + count]
                taken[want] += count
            flat = tuple(group * self.tp + index for group in sorted(places) for index in range(self.tp))
            at = list(members)
            nodes = np.unique(self.node[at], return_inverse=True)[1]
            pattern = (tuple(self.has[at].tolist()), tuple(self.wants[list(flat)].tolist()), tuple(nodes.tolist()))
            yield _Block(members, flat, pattern)

    def _member_blocks(self, unit: int) -> Iterator[tuple[int, ...]]:
        """Ranks in blocks that have every kind in proportion, are whole nodes, and multiples of `unit`."""
        of_kind = [np.flatnonzero(self.has == kind) for kind in range(len(self.held))]
        num_units = gcd(*(len(members) for members in of_kind))
        unit_of = np.empty(len(self.has), dtype=np.int64)
        for members in of_kind:
            unit_of[members] = np.arange(len(members)) * num_units // len(members)
        pending: list[int] = []
        apart = self.node if self.node.min() < self.node.max() else unit_of  # one node is nearness that decides nothing
        for units in _connected(unit_of, apart, num_units):
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


def _solve(task: _Task, block: _Block) -> list[int]:
    """For each place of the block the member that takes it."""
    has, wants, node = (numbers[list(at)] for numbers, at in
                        ((task.has, block.members), (task.wants, block.places), (task.node, block.members)))
    columns = best_matching([task.received[np.ix_(has, wants)], _far(task, has, node)[:, wants],
                             (wants[:, None] != wants).astype(np.int64)])
    return _in_order(wants, wants[columns], range(len(has)))


def _far(task: _Task, has: Ints, node: Ints) -> Ints:
    """`[members, destination kinds]`: elements of a kind that no member of this one's node has."""
    far = np.empty((len(has), len(task.wanted)), dtype=np.int64)
    for each in np.unique(node):
        lacks = ~task.held[has[node == each]].any(axis=0)
        far[node == each] = lacks * task.numel @ task.wanted.T
    return far


def _in_order(wants: Ints, taken: Ints, members: Sequence[int]) -> list[int]:
    """The i-th place that wants a kind goes to the i-th member that takes this kind."""
    queues: dict[int, list[int]] = defaultdict(list)
    for member, kind in zip(members, taken.tolist()):
        queues[kind].append(member)
    return [queues[kind].pop(0) for kind in wants.tolist()]


def _solve_by_node(task: _Task, block: _Block) -> list[int]:
    """As `_solve`, with every tensor group in one node: which groups each node takes, then a matching in each node."""
    wants, node = task.wants[list(block.places)], task.node[list(block.members)]
    kinds = [tuple(group) for group in wants.reshape(-1, task.tp).tolist()]
    members = [np.flatnonzero(node == each).tolist() for each in np.unique(node)]
    has = [task.has[[block.members[member] for member in near]] for near in members]
    groups: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)  # by what they want
    for near, kinds_had, chosen in zip(members, has, _share_out(task, has, kinds)):
        taken = np.array(chosen).reshape(-1)
        columns = best_matching(_node_costs(task, kinds_had, taken))
        in_order = _in_order(taken, taken[columns], near)
        for index, kind in enumerate(chosen):
            groups[kind].append(in_order[index * task.tp:(index + 1) * task.tp])
    return [member for kind in kinds for member in groups[kind].pop(0)]


def _node_costs(task: _Task, has: Ints, wants: Ints) -> list[Ints]:
    return [task.received[np.ix_(has, wants)], (wants[:, None] != wants).astype(np.int64)]


def _share_out(task: _Task, has: Sequence[Ints], kinds: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """For each node, whose members have the kinds `has`, the tensor groups that it takes, of all groups `kinds`.

    What a node receives depends on the groups that it takes as a set, so that each set is a choice with its cost.
    """
    num_groups = [len(kinds_had) // task.tp for kinds_had in has]
    distinct = list(dict.fromkeys(kinds))
    natural = np.split(np.array([distinct.index(kind) for kind in kinds]), np.cumsum(num_groups)[:-1])
    if len(distinct) == 1:
        return [[distinct[0]] * count for count in num_groups]
    choices = {count: list(combinations_with_replacement(range(len(distinct)), count)) for count in set(num_groups)}
    costs: dict[Hashable, tuple[Ints, Ints]] = {}
    for kinds_had, count in zip(has, num_groups):
        if tuple(kinds_had) not in costs:
            priced = [_price(task, kinds_had, [distinct[each] for each in choice]) for choice in choices[count]]
            costs[tuple(kinds_had)] = tuple(np.array(priced, dtype=np.int64).T)
    apart = [[sum((Counter(choice) - Counter(usual.tolist())).values()) for choice in choices[count]]
             for count, usual in zip(num_groups, natural)]
    per_node = [np.stack([*costs[tuple(kinds_had)], np.array(other)]) for kinds_had, other in zip(has, apart)]
    supply = [kinds.count(kind) for kind in distinct]
    uses = [np.array([[choice.count(each) for each in range(len(distinct))] for choice in choices[count]])
            for count in num_groups]
    chosen = best_choices(per_node, uses, supply)
    return [[distinct[each] for each in choices[count][choice]] for count, choice in zip(num_groups, chosen)]


def _price(task: _Task, has: Ints, groups: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Elements that a node receives in all, and over slow links, if it takes these tensor groups."""
    wants = np.array(groups).reshape(-1)
    received = task.received[np.ix_(has, wants)]
    columns = best_matching([received])
    far = task.wanted[wants].any(axis=0) & ~task.held[has].any(axis=0)
    return int(received[np.arange(len(has)), columns].sum()), int(far @ task.numel)
