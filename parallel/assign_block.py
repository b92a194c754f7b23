"""Solving one block of an assignment: which groups of coordinates each node takes, then who in a node takes which.

Owns the two levels and their costs; the solvers are `matching`'s.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations_with_replacement, islice
from math import comb

import numpy as np

from hybridflow.parallel.assign_task import Block, Group, Ints, Task
from hybridflow.parallel.matching import best_choices, best_matching

# Sets of groups, over the nodes of a block, that are all weighed against each other (a third of a millisecond each).
MAX_CHOICES = 12_000
Choice = tuple[int, ...]  # the groups that a node takes, by number, ascending


def solve_block(task: Task, block: Block, group_size: int) -> list[int]:
    """For each place of the block the member that takes it: fewest elements received; then fewest over slow links, each
    counted once for a node; then near the order of the ranks.

    The first is exact. So is the second, unless there are more than `MAX_CHOICES`: then what comes over slow links is
    counted for each rank where groups are of one place, and else nodes choose among the groups that suit them best
    (which may cost the first aim too).

    Args:
        group_size: how many consecutive places must go to one node; 1 leaves all free.
    """
    has, wants, node = task.has[list(block.members)], task.wants[list(block.places)], task.node[list(block.members)]
    groups = [tuple(group) for group in wants.reshape(-1, group_size).tolist()]
    near = [np.flatnonzero(node == each).tolist() for each in np.unique(node)]
    if group_size > 1 and len(near) > 1:
        return _solve_by_node(task, has, groups, near)
    at_once = _solve_at_once(task, has, wants, near)
    if _cost(task, has, wants, near, at_once)[1] == 0 or _num_choices([has[m] for m in near], groups) > MAX_CHOICES:
        return at_once
    return min(at_once, _solve_by_node(task, has, groups, near), key=lambda taker: _cost(task, has, wants, near, taker))


def _solve_by_node(task: Task, has: Ints, groups: Sequence[Group], near: Sequence[list[int]]) -> list[int]:
    """As `solve_block`, node by node (`near`: the members of each)."""
    teams: dict[Group, list[list[int]]] = defaultdict(list)  # members that take a group, by what it wants
    for members, chosen in zip(near, _share_out(task, [has[members] for members in near], groups)):
        taken, size = np.array(chosen).reshape(-1), len(chosen[0])
        team = _match(task, has[members], taken, members)
        for index, group in enumerate(chosen):
            teams[group].append(team[index * size:(index + 1) * size])
    queues = {group: iter(each) for group, each in teams.items()}
    return [member for group in groups for member in next(queues[group])]


def _match(task: Task, has: Ints, wants: Ints, members: Sequence[int], *further: Ints) -> list[int]:
    """For each place, which wants `wants`, the member that takes it; the first place counts as the first member's."""
    moved = (wants[:, None] != wants).astype(np.int64)
    columns = best_matching([task.received[np.ix_(has, wants)], *further, moved])
    return _in_order(wants, wants[columns], members)


def _solve_at_once(task: Task, has: Ints, wants: Ints, near: Sequence[list[int]]) -> list[int]:
    """As `solve_block` without groups, but what comes over slow links is counted for every rank of a node."""
    return _match(task, has, wants, range(len(has)), _far(task, has, near)[:, wants], _apart(wants))


def _cost(task: Task, has: Ints, wants: Ints, near: Sequence[list[int]], taker: Sequence[int]) -> tuple[int, int]:
    """Elements that the block receives in all, and over slow links, if member `taker[i]` takes place i."""
    wanted = np.empty_like(wants)
    wanted[list(taker)] = wants  # by each member
    far = [task.wanted[wanted[members]].any(axis=0) & ~task.held[has[members]].any(axis=0) for members in near]
    return int(task.received[has, wanted].sum()), int(sum(each @ task.numel for each in far))


def _apart(wants: Ints) -> Ints:
    """`[members, places]`: how many replicas apart a member is from a place, where members in order are dealt out to
    the replicas (the i-th of the places that want a kind is replica i's): keeps a replica's ranks together.
    """
    seen: Counter[int] = Counter()
    turn = []
    for kind in wants.tolist():
        turn.append(seen[kind])
        seen[kind] += 1
    total = np.array([seen[kind] for kind in wants.tolist()])
    return np.abs(np.arange(len(wants))[:, None] * total // len(wants) - np.array(turn))


def _far(task: Task, has: Ints, near: Sequence[list[int]]) -> Ints:
    """`[members, destination kinds]`: elements of a kind that no member of this one's node has."""
    far = np.empty((len(has), len(task.wanted)), dtype=np.int64)
    for members in near:
        far[members] = ~task.held[has[members]].any(axis=0) * task.numel @ task.wanted.T
    return far


def _in_order(wants: Ints, taken: Ints, members: Sequence[int]) -> list[int]:
    """The i-th place that wants a kind goes to the i-th member that takes this kind."""
    queues: dict[int, list[int]] = defaultdict(list)
    for member, kind in zip(members, taken.tolist()):
        queues[kind].append(member)
    turns = {kind: iter(queue) for kind, queue in queues.items()}
    return [next(turns[kind]) for kind in wants.tolist()]


def _share_out(task: Task, has: Sequence[Ints], groups: Sequence[Group]) -> list[list[Group]]:
    """For each node, whose members have the kinds `has`, the groups that it takes of all `groups`.

    What a node receives depends on the groups that it takes together, so that each such set is a choice with a cost.
    """
    distinct = list(dict.fromkeys(groups))
    number = {group: index for index, group in enumerate(distinct)}
    remaining = iter(groups)
    usual = [list(islice(remaining, len(kinds) // len(groups[0]))) for kinds in has]
    if len(distinct) == 1:
        return usual
    usual_choices = [tuple(sorted(number[group] for group in part)) for part in usual]
    choices = _choices(task, has, [len(part) for part in usual], distinct, usual_choices,
                       _num_choices(has, groups) <= MAX_CHOICES)
    prices: dict[tuple[tuple[int, ...], Choice], tuple[int, int]] = {}
    costs = []
    for kinds, options, habit in zip(has, choices, usual_choices):
        node = tuple(sorted(kinds.tolist()))
        for choice in options:
            if (node, choice) not in prices:
                prices[node, choice] = _price(task, kinds, [distinct[each] for each in choice])
        apart = [sum((Counter(choice) - Counter(habit)).values()) for choice in options]
        costs.append(np.array([(*prices[node, choice], far) for choice, far in zip(options, apart)]).T)
    uses = [np.array([np.bincount(choice, minlength=len(distinct)) for choice in options]) for options in choices]
    supply = [groups.count(group) for group in distinct]
    taken = [options[pick] for options, pick in zip(choices, best_choices(costs, uses, supply))]
    return [part if choice == habit else [distinct[each] for each in choice]
            for part, choice, habit in zip(usual, taken, usual_choices)]


def _num_choices(has: Sequence[Ints], groups: Sequence[Group]) -> int:
    """How many sets of groups all nodes have to choose from, nodes of equal members counted once."""
    num_distinct = len(set(groups))
    if num_distinct == 1:
        return 1
    return sum(comb(len(kinds) // len(groups[0]) + num_distinct - 1, num_distinct - 1)
               for kinds in {tuple(sorted(kinds.tolist())) for kinds in has})


def _choices(task: Task, has: Sequence[Ints], counts: Sequence[int], distinct: Sequence[Group],
             usual: Sequence[Choice], weigh_all: bool) -> list[list[Choice]]:
    """The sets of groups that each node may take: all, or where these are too many, those of the groups that suit it
    best and the usual one, so that there is always a way.
    """
    if weigh_all:
        every = {count: list(combinations_with_replacement(range(len(distinct)), count)) for count in set(counts)}
        return [every[count] for count in counts]
    share = max(1, MAX_CHOICES // len(has))
    found = []
    for kinds, count, habit in zip(has, counts, usual):
        # The best that a group can hope for in this node: each member of it with the rank that receives least.
        hope = [task.received[np.ix_(kinds, group)].min(axis=0).sum() for group in distinct]
        suiting = max(n for n in range(1, len(distinct) + 1) if n == 1 or comb(count + n - 1, count) <= share)
        best = sorted(np.argsort(hope, kind="stable")[:suiting].tolist())
        found.append(sorted({*combinations_with_replacement(best, count), habit}))
    return found


def _price(task: Task, has: Ints, groups: Sequence[Group]) -> tuple[int, int]:
    """Elements that a node receives in all, and over slow links, if it takes these groups."""
    wants = np.array(groups).reshape(-1)
    received = task.received[np.ix_(has, wants)]
    columns = best_matching([received])
    far = task.wanted[wants].any(axis=0) & ~task.held[has].any(axis=0)
    return int(received[np.arange(len(has)), columns].sum()), int(far @ task.numel)
