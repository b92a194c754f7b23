"""Lexicographic matchings and choices against every one of them, in small."""

from itertools import permutations, product

import numpy as np
import pytest

from hybridflow.parallel.matching import best_choices, best_matching


@pytest.mark.parametrize("size", range(1, 6))
def test_matchings_of_several_costs(size: int):
    draw = np.random.default_rng(size)
    for high in (2, 3, 10**12):
        for _ in range(15):
            costs = [draw.integers(0, high, (size, size)) for _ in range(3)]
            value = lambda columns, costs=costs: tuple(int(sum(c[i, j] for i, j in enumerate(columns))) for c in costs)  # noqa: E731
            assert value(best_matching(costs)) == min(map(value, permutations(range(size))))


@pytest.mark.parametrize("num_goods", [1, 2])
def test_choices_that_use_up_the_supply(num_goods: int):
    """Three rows with four choices each: one good, or one or two of each of two."""
    draw = np.random.default_rng(num_goods)
    for high in (2, 5, 10**9):
        for _ in range(8):
            uses = [np.eye(4, dtype=np.int64) if num_goods == 1 else draw.integers(0, 3, (4, 2)) for _ in range(3)]
            costs = [draw.integers(0, high, (2, 4)) for _ in range(3)]
            supply = sum(use[draw.integers(4)] for use in uses).tolist()
            value = lambda picks, costs=costs: tuple(sum(int(c[k, i]) for c, i in zip(costs, picks)) for k in (0, 1))  # noqa: E731
            fitting = [picks for picks in product(range(4), repeat=3)
                       if sum(use[i] for use, i in zip(uses, picks)).tolist() == supply]
            assert value(best_choices(costs, uses, supply)) == min(map(value, fitting))
