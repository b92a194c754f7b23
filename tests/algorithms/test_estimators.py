"""Every estimator of the table against loops over rows and tokens, on ragged, masked, grouped and degenerate rows, and
the same however the rows lie on ranks.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hybridflow.algorithms.advantages import AdvantageOptions, Rewarded
from hybridflow.algorithms.dapo import groups_with_signal, soft_overlong_punishment
from hybridflow.algorithms.estimation import estimated
from hybridflow.algorithms.functions import find_estimator
from hybridflow.algorithms.grpo import group_relative
from hybridflow.algorithms.registry import ADVANTAGES
from hybridflow.algorithms.safe_rlhf import LagrangeMultiplier
from tests.algorithms import dense

NAN = float("nan")
OPTIONS = AdvantageOptions(gamma=0.9, lam=0.8, multiplier=0.7)
ROW_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "remax")


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


# lengths, groups, rewards, tokens that are not trained; rows whose reward is NaN are not trained either.
CASES = {
    "ragged": ((5, 0, 1, 63, 3, 2, 4, 1), (7, 7, 7, -1, -1, 3, -1, 3), (0.5, -1, 2, 1, 0.1, 3, 1, 0), ()),
    "masked inside, at the ends and whole": (
        (5, 4, 6, 1, 3), (0, 0, 1, 1, 1), (1, 0, 2, 0.5, 3), (1, 3, 4, 5, 6, 9, 14, 15, 18)),
    "failed": ((2, 3, 1, 4, 2), (0, 0, 0, 1, 1), (1, NAN, 0.25, NAN, 5), (0,)),
    "equal rewards": ((3, 2, 4), (0, 0, 0), (0.1, 0.1, 0.1), ()),
    "groups of one": ((3, 2), (0, 1), (4, 5), ()),
    "all failed": ((2, 1), (0, 0), (NAN, NAN), ()),
    "nothing trained": ((2, 1), (0, 0), (1, 2), (0, 1, 2)),
    "one token": ((1,), (0,), (1,), ()),
    "only empty rows": ((0, 0), (0, 0), (1, 2), ()),
    "no rows": ((), (), (), ()),
}


def rewarded_of(case, with_cost=True):
    lengths, groups, rewards, untrained = CASES[case]
    draw = torch.Generator().manual_seed(len(lengths))
    count = sum(lengths)
    mask = tensor([0.0 if np.isnan(r) else 1.0 for r, n in zip(rewards, lengths) for _ in range(n)])
    mask[list(untrained)] = 0.0
    token_rewards, values = (torch.randn(count, generator=draw, dtype=torch.float64) for _ in range(2))
    # What is not trained must show nowhere.
    token_rewards, values = (torch.where(mask != 0, x, NAN) for x in (token_rewards, values))
    baselines = torch.randn(len(rewards), generator=draw, dtype=torch.float64)
    if case == "ragged":
        baselines[2] = NAN
    result = Rewarded(tensor(rewards), torch.tensor(groups, dtype=torch.int64), tuple(range(len(rewards))), lengths,
                      mask, token_rewards, values, baselines)
    if not with_cost:
        return result
    return replace(result, cost=replace(result, token_rewards=-2 * token_rewards.flip(0), values=values + 1)
                   if case in ("ragged", "groups of one", "one token") else replace(result, values=values * 2))


def dense_advantages(name, rewarded, options):
    """A list of arrays a row, and of returns (None without a critic)."""
    masks, parts = dense.rows(rewarded.mask, rewarded.lengths), []
    rewards, groups, baselines = (x.numpy() for x in (rewarded.row_rewards, rewarded.groups, rewarded.baselines))
    tokens = [r[m != 0] for r, m in zip(dense.rows(rewarded.token_rewards, rewarded.lengths), masks, strict=True)]
    if name in ROW_ESTIMATORS:
        for row, mask in enumerate(masks):
            parts.append(np.where(mask != 0, dense.row_advantage(name, rewards, groups, row, baselines), 0.0))
        return parts, None
    if name == "reinforce_pp":
        return [dense.on_trained(dense.returns_to_go(r, options.gamma), m) for r, m in zip(tokens, masks)], None
    values = [v[m != 0] for v, m in zip(dense.rows(rewarded.values, rewarded.lengths), masks, strict=True)]
    raw = [dense.gae_row(r, v, options.gamma, options.lam) for r, v in zip(tokens, values, strict=True)]
    returns = [dense.on_trained(a + v, m) for a, v, m in zip(raw, values, masks, strict=True)]
    parts = [dense.on_trained(a, m) for a, m in zip(raw, masks, strict=True)]
    if name == "safe_rlhf":
        costs, _ = dense_advantages("gae", rewarded.cost, options)
        weight = options.multiplier
        parts = [(a - weight * c) / (1 + weight) for a, c in zip(parts, costs, strict=True)]
    return parts, returns


def flat(parts):
    return np.concatenate([np.zeros(0), *parts])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_estimator_equals_the_dense_formula(name, case):
    rewarded = rewarded_of(case)
    estimate = find_estimator(name)(rewarded, OPTIONS)
    expected, returns = dense_advantages(name, rewarded, OPTIONS)
    np.testing.assert_allclose(estimate.advantages.numpy(), flat(expected), rtol=0, atol=1e-9)
    assert (estimate.returns is None) == (returns is None)
    if returns is not None:
        np.testing.assert_allclose(estimate.returns.numpy(), flat(returns), rtol=0, atol=1e-9)
    if name == "safe_rlhf":
        np.testing.assert_allclose(estimate.cost_returns.numpy(),
                                   flat(dense_advantages("gae", rewarded.cost, OPTIONS)[1]), rtol=0, atol=1e-9)
    result = estimated(find_estimator(name), rewarded, OPTIONS, whitened=True)
    masks = dense.rows(rewarded.mask, rewarded.lengths)
    np.testing.assert_allclose(result.estimate.advantages.numpy(), flat(dense.whitened(expected, masks)), rtol=0,
                               atol=1e-6 if result.variance < 1e-6 else 1e-9)


def test_grpo_without_the_deviation_is_dr_grpo():
    rewarded = rewarded_of("ragged")
    plain = find_estimator("grpo")(rewarded, replace(OPTIONS, std_normalise=False))
    assert torch.equal(plain.advantages, find_estimator("dr_grpo")(rewarded, OPTIONS).advantages)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_it_does_not_matter_which_rank_has_a_row(name):
    """Two ranks, one of them with rows in another order; then three, one without rows. Sums over ranks are made by
    running each rank's estimator first with what the others add left open, as an all-reduce would.
    """
    whole = rewarded_of("masked inside, at the ends and whole")
    alone = estimated(find_estimator(name), whole, OPTIONS, whitened=True)
    expected = alone.estimate.advantages.split(whole.lengths)
    for rows_of in (((4, 0), (1, 2, 3)), ((2,), (), (0, 1, 3, 4))):
        summed = sum_of_ranks(name, whole, rows_of)
        for rows in rows_of:
            mine = part(whole, rows, lambda x, summed=summed: summed)
            result = estimated(find_estimator(name), mine, OPTIONS, whitened=True)
            assert (result.mean, result.variance) == pytest.approx((alone.mean, alone.variance), abs=1e-12)
            wanted = torch.cat([expected[row] for row in rows]) if rows else torch.zeros(0, dtype=torch.float64)
            torch.testing.assert_close(result.estimate.advantages, wanted, rtol=0, atol=1e-9)


def sum_of_ranks(name, whole, rows_of):
    told = []
    for rows in rows_of:
        estimated(find_estimator(name), part(whole, rows, lambda x: told.append(x) or x), OPTIONS, whitened=False)
    return sum(told)


def part(whole, rows, total):
    """What the rank that has `rows` is given."""
    def of(column):
        pieces = column.split(whole.lengths)
        return torch.cat([pieces[row] for row in rows]) if rows else column[:0]

    lengths = tuple(whole.lengths[row] for row in rows)
    cost = whole.cost if whole.cost is None else part(whole.cost, rows, total)
    return replace(whole, mine=rows, lengths=lengths, mask=of(whole.mask), token_rewards=of(whole.token_rewards),
                   values=of(whole.values), cost=cost, total=total)


def test_what_is_missing_is_named():
    bare = replace(rewarded_of("ragged"), values=None, baselines=None, cost=None)
    for name, text in (("gae", "values of a critic"), ("remax", "greedy answer"), ("safe_rlhf", "cost of each")):
        with pytest.raises(ValueError, match=text):
            find_estimator(name)(bare, OPTIONS)
    with pytest.raises(ValueError, match="multiplier is -1"):
        find_estimator("safe_rlhf")(rewarded_of("ragged"), replace(OPTIONS, multiplier=-1))


def test_by_hand():
    rewarded = Rewarded(tensor([3, 1, 2]), torch.zeros(3, dtype=torch.int64), (0, 1, 2), (1, 1, 2),
                        tensor([1, 1, 0, 1]), tensor([3, 1, 9, 2]), baselines=tensor([1, 1, 1]))
    told = {name: find_estimator(name)(rewarded, AdvantageOptions()).advantages.tolist()
            for name in ("dr_grpo", "rloo", "remax", "reinforce_pp")}
    assert told == {"dr_grpo": [1, -1, 0, 0], "rloo": [1.5, -1.5, 0, 0], "remax": [2, 0, 0, 1],
                    "reinforce_pp": [3, 1, 0, 2]}


def test_gae_goes_on_at_the_next_trained_token():
    # Tokens 1 and 2 come from a tool: the value after token 0 is that of token 3, whatever stands between.
    rewarded = Rewarded(tensor([1]), torch.zeros(1, dtype=torch.int64), (0,), (4,), tensor([1, 0, 0, 1]),
                        tensor([0, 50, 50, 1]), tensor([0.5, 70, 70, 0.25]))
    estimate = find_estimator("gae")(rewarded, AdvantageOptions(gamma=1.0, lam=0.0))
    assert estimate.advantages.tolist() == [-0.25, 0, 0, 0.75]
    assert estimate.returns.tolist() == [0.25, 0, 0, 1]


def test_the_soft_overlong_punishment():  # DAPO, eq. 13
    lengths = torch.arange(0, 25)
    found = soft_overlong_punishment(lengths, max_length=20, buffer=8)
    assert found.tolist() == pytest.approx([dense.overlong(n, 20, 8) for n in range(25)], abs=1e-12)
    assert found[[12, 16, 20, 21]].tolist() == [0.0, -0.5, -1.0, -1.0]
    for buffer in (0, 21):
        with pytest.raises(ValueError, match=f"buffer is {buffer}"):
            soft_overlong_punishment(lengths, max_length=20, buffer=buffer)


def test_groups_with_a_signal():  # DAPO, eq. 11
    rewards = tensor([1, 1, 0, 1, 0, NAN, NAN, NAN, 0.1, 0.1, 0.1, 5])
    groups = torch.tensor([9, 9, 4, 4, 2, 2, 8, 8, 1, 1, 1, 0])
    assert groups_with_signal(rewards, groups).tolist() == [4]
    assert groups_with_signal(tensor([]), groups[:0]).tolist() == []
    known = ~rewards.isnan()
    silent = group_relative(rewards[known], groups[known])[groups[known] != 4]
    assert not silent.any()  # the others say nothing


def test_the_lagrange_multiplier():  # Safe RLHF, eq. 31
    multiplier = LagrangeMultiplier.of(0.5, lr=0.1, limit=-1.0)
    assert multiplier.after(3.0).value == pytest.approx(0.5 * np.exp(0.1 * 0.5 * 4.0), abs=1e-12)
    assert multiplier.after(-1.0).value == pytest.approx(0.5, abs=1e-15)
    assert multiplier.after(-1e6).value == pytest.approx(1e-3)
    assert LagrangeMultiplier.of(1, lr=1, largest=2).after(9).value == pytest.approx(2)
    with pytest.raises(ValueError, match="mean cost is NaN"):
        multiplier.after(NAN)
    for bad in ({"value": 0, "lr": 1}, {"value": 1, "lr": 0}, {"value": 3, "lr": 1, "largest": 2}):
        with pytest.raises(ValueError, match="lr must be positive"):
            LagrangeMultiplier.of(**bad)
