"""Exact matchings of rows to columns under several costs, the first of which counts most.

Owns the solver (scipy's), which nothing else imports. Knows numbers only: what rows, columns and costs are is the
caller's. All is done in whole numbers, so that equal is equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import LinearConstraint, linear_sum_assignment, milp

Costs = NDArray[np.int64]


def best_matching(costs: Sequence[Costs]) -> NDArray[np.int64]:
    """The column of each row in a perfect matching of least first cost, among those of least second cost, and so on.

    Exact: by complementary slackness the matchings of least cost are the perfect matchings on the edges that are tight
    under the dual of any one of them, so each further cost is minimised on these edges alone.

    Args:
        costs: `[n, n]` each, whole numbers whose sums stay under 2^53.
    Example: `best_matching([[[0, 0], [0, 0]], [[1, 0], [0, 1]]])` gives columns `[1, 0]`.
    """
    allowed = np.ones_like(costs[0], dtype=bool)
    columns = np.arange(len(allowed))
    for cost in costs:
        forbidding = np.where(allowed, cost, np.inf)
        columns = linear_sum_assignment(forbidding)[1]
        if cost is not costs[-1]:
            allowed = _tight(forbidding, columns)
    return columns


def _tight(cost: NDArray[np.float64], columns: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The edges of a matching of least cost: those that a dual of the matching `columns` leaves no slack.

    The dual of a column is its distance from an outside point, where moving row i from its own column to another costs
    the difference (Bellman-Ford; no cycle is negative since the matching is of least cost).
    """
    change = cost - cost[np.arange(len(columns)), columns][:, None]
    dual = np.zeros(len(columns))
    while True:
        reached = dual[columns][:, None] + change
        shorter = np.minimum(dual, reached.min(axis=0))
        if np.array_equal(shorter, dual):
            return reached == dual
        dual = shorter


def best_choices(costs: Sequence[Costs], uses: Sequence[Costs], supply: Sequence[int]) -> list[int]:
    """One choice for each row, which together use exactly the supply; best under the first cost, then the second, ...

    Args:
        costs: for each row `[num_costs, choices]`.
        uses: for each row `[choices, goods]`, which of the goods a choice uses up, and how many.
        supply: `[goods]`, how many there are.
    """
    if all((use.sum(axis=1) == 1).all() for use in uses):
        return _one_each(costs, uses, supply)
    starts = np.cumsum([0] + [len(use) for use in uses])
    flat, rows = np.concatenate(costs, axis=1), np.repeat(np.arange(len(uses)), np.diff(starts))
    one = LinearConstraint((np.arange(len(uses))[:, None] == rows).astype(np.int64), 1, 1)
    limits = [one, LinearConstraint(np.concatenate(uses).T, supply, supply)]
    chosen = None
    for cost in flat:
        found = milp(cost / max(1, np.gcd.reduce(cost)), integrality=np.ones(len(cost)), bounds=(0, 1),
                     constraints=limits, options={"mip_rel_gap": 0.0})
        assert found.x is not None, found.message
        picked = found.x > 0.5
        # The solver works to a tolerance: a later cost counts only where the earlier are met in whole numbers.
        if chosen is not None and any(int(c @ picked) > int(c @ chosen) for c in flat[:len(limits) - 2]):
            break
        chosen = picked
        limits.append(LinearConstraint(cost[None], -np.inf, int(cost @ chosen)))
    return [int(np.flatnonzero(chosen[start:end])[0]) for start, end in zip(starts, starts[1:])]


def _one_each(costs: Sequence[Costs], uses: Sequence[Costs], supply: Sequence[int]) -> list[int]:
    """As `best_choices` where every choice uses one good: a matching of rows to goods."""
    goods = np.repeat(np.arange(len(supply)), supply)
    choice_of = np.stack([use.argmax(axis=0)[goods] for use in uses])  # [rows, goods]: the choice that takes the good
    matrices = [np.stack([cost[number][choice] for cost, choice in zip(costs, choice_of)])
                for number in range(len(costs[0]))]
    columns = best_matching(matrices)
    return choice_of[np.arange(len(columns)), columns].tolist()
