import numpy as np
import pytest
import torch

from hybridflow.algorithms.advantages import mean_and_variance, moment_sums, whiten
from hybridflow.algorithms.grpo import centred, group_relative
from hybridflow.algorithms.ppo import gae
from tests.algorithms import dense

LENGTHS = (5, 0, 1, 63, 100, 2)


def randn(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 0.5), (0.9, 1.0)])
def test_gae_equals_the_double_sum(gamma, lam):
    rewards, values = randn(sum(LENGTHS), 1), randn(sum(LENGTHS), 2)
    advantages, returns = gae(rewards, values, LENGTHS, gamma=gamma, lam=lam)
    pairs = zip(dense.rows(rewards, LENGTHS), dense.rows(values, LENGTHS), strict=True)
    expected = np.concatenate([dense.gae_row(r, v, gamma, lam) for r, v in pairs])
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(returns.numpy(), expected + values.numpy(), rtol=0, atol=1e-9)


def test_gae_by_hand():
    # gamma 1, lam 1: the return is the sum of the rewards to come, whatever the critic said.
    advantages, returns = gae(torch.tensor([0.0, 0.0, 3.0]), torch.tensor([1.0, 5.0, 2.0]), (3,), gamma=1.0, lam=1.0)
    assert returns.tolist() == [3.0, 3.0, 3.0]
    assert advantages.tolist() == [2.0, -2.0, 1.0]
    # lam 0: one step of temporal difference.
    advantages, _ = gae(torch.tensor([0.0, 0.0, 3.0]), torch.tensor([1.0, 5.0, 2.0]), (3,), gamma=0.5, lam=0.0)
    assert advantages.tolist() == [1.5, -4.0, 1.0]


def test_gae_is_the_same_for_every_cut_into_batches_of_rows():
    rewards, values = randn(sum(LENGTHS), 1), randn(sum(LENGTHS), 2)
    whole, _ = gae(rewards, values, LENGTHS, gamma=0.99, lam=0.95)
    pieces = zip(rewards.split(LENGTHS), values.split(LENGTHS), LENGTHS, strict=True)
    apart = torch.cat([gae(r, v, (n,), gamma=0.99, lam=0.95)[0] for r, v, n in pieces])
    torch.testing.assert_close(whole, apart, rtol=0, atol=1e-12)


def test_gae_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="gamma is 1.1"):
        gae(torch.zeros(2), torch.zeros(2), (2,), gamma=1.1, lam=1.0)
    with pytest.raises(ValueError, match="values has shape"):
        gae(torch.zeros(2), torch.zeros(3), (2,), gamma=1.0, lam=1.0)


@pytest.mark.parametrize("by_std", [True, False])
def test_grpo_equals_the_dense_formula(by_std):
    groups = torch.tensor([7, -1, 7, 3, -1, 7, 100, 3, 3, -1])
    rewards = randn(10, 4)
    rewards[[3, 7, 8]] = 0.1  # equal: (0.1 + 0.1 + 0.1) / 3 is not 0.1 in floating point
    advantages = (group_relative if by_std else centred)(rewards, groups)
    expected = dense.grpo(rewards.numpy(), groups.numpy(), by_std)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=0, atol=1e-9)
    assert advantages[[3, 7, 8]].tolist() == [0.0, 0.0, 0.0]
    assert advantages[6].item() == 0.0  # a group of one


def test_grpo_by_hand():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    assert centred(rewards, groups).tolist() == [0.5, -0.5, -0.5, 0.5]
    scaled = group_relative(rewards, groups)
    torch.testing.assert_close(scaled, torch.tensor([1.0, -1.0, -1.0, 1.0]) / 2**0.5, rtol=1e-5, atol=0)


def test_grpo_of_nothing():
    assert group_relative(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    with pytest.raises(ValueError, match="rows"):
        group_relative(torch.zeros(2), torch.zeros(3, dtype=torch.int64))


def test_whitening_does_not_depend_on_the_cut():
    x, mask = randn(100, 5) * 3 + 1e3, (randn(100, 6) > 0).double()
    poisoned = torch.where(mask != 0, x, float("nan"))
    cuts = (1, 40, 0, 59)
    sums = sum(moment_sums(a, m) for a, m in zip(poisoned.split(cuts), mask.split(cuts), strict=True))
    mean, variance = mean_and_variance(sums)
    kept = x[mask != 0].numpy()
    result = whiten(poisoned, mask, mean=mean, variance=variance)
    expected = (kept - kept.mean()) / np.sqrt(kept.var() + 1e-8)
    np.testing.assert_allclose(result[mask != 0].numpy(), expected, rtol=0, atol=1e-9)
    assert (result[mask == 0] == 0).all()


def test_whitening_degenerate_inputs_stays_finite():
    mean, variance = mean_and_variance(moment_sums(torch.full((3,), 0.1), torch.ones(3)))
    assert whiten(torch.full((3,), 0.1), torch.ones(3), mean=mean, variance=variance).abs().max() < 1e-3
    assert mean_and_variance(moment_sums(torch.ones(3), torch.zeros(3))) == (0.0, 0.0)
    assert mean_and_variance(moment_sums(torch.ones(0), torch.zeros(0))) == (0.0, 0.0)
