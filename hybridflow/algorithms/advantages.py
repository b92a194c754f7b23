"""Advantages: GAE for a critic, group-relative for GRPO, and whitening by global moments.

Takes rewards, values and row lengths; never a model. Nothing here carries a gradient: inputs are detached by contract
(they come from forward passes without autograd).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.ragged import check_lengths, discounted_suffix_sum, next_in_row


def gae(
    rewards: Tensor, values: Tensor, lengths: tuple[int, ...], *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 11-16) on packed rows.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = sum_k (gamma lam)^k delta_{t+k}, with V = 0 after the last token of a
    row: a response is a finished episode, whether it stopped or ran out of length.

    Args:
        rewards, values: `[tokens]`, rows packed one after another.
        lengths: tokens of each row; 0 is allowed.
        gamma, lam: discount and trace decay, each in [0, 1].

    Returns:
        (advantages, returns), both `[tokens]`, with returns = advantages + values.

    Raises:
        ValueError: a tensor does not fit the lengths, or gamma or lam is outside [0, 1].
    """
    check_lengths(rewards, lengths, "rewards")
    check_lengths(values, lengths, "values")
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"{name} is {factor}; a discount lies in [0, 1], for example 1.0")
    deltas = rewards + gamma * next_in_row(values, lengths) - values
    advantages = discounted_suffix_sum(deltas, lengths, gamma * lam)
    return advantages, advantages + values


def grpo(row_rewards: Tensor, group_ids: Tensor, *, normalise_by_std: bool, eps: float = 1e-6) -> Tensor:
    """Group-relative advantages (GRPO, DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    A_i = (r_i - mean of its group) / (standard deviation of its group + eps), the deviation with n - 1 in the
    denominator; without `normalise_by_std` only the mean is taken off (Dr. GRPO, arXiv:2503.20783). A group whose
    rewards are all equal, hence also a group of one, says nothing: exactly 0.

    Args:
        row_rewards: `[rows]`, one reward a response.
        group_ids: `[rows]` int64, equal for the responses to one prompt; any values, in any order. A group must be
            complete in one call.
        normalise_by_std: divide by the deviation of the group.
        eps: added to the deviation, in units of the reward.

    Returns:
        `[rows]` advantages, to be put on every token of the row (`ragged.to_tokens`).

    Raises:
        ValueError: the shapes differ.
    """
    if row_rewards.shape != group_ids.shape or row_rewards.dim() != 1:
        raise ValueError(
            f"rewards {tuple(row_rewards.shape)} and group ids {tuple(group_ids.shape)} must both be [rows]"
        )
    _, group = torch.unique(group_ids, return_inverse=True)  # [rows], 0 .. groups-1
    num_groups = int(group.max()) + 1 if len(group) else 0
    zeros = row_rewards.new_zeros(num_groups)
    count = zeros.index_add(0, group, torch.ones_like(row_rewards))
    centred = row_rewards - (zeros.index_add(0, group, row_rewards) / count)[group]
    lowest = zeros.scatter_reduce(0, group, row_rewards, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, group, row_rewards, "amax", include_self=False)
    # Equal rewards differ from their mean by rounding, which dividing by a deviation of rounding would blow up.
    centred = torch.where((lowest == highest)[group], 0.0, centred)
    if not normalise_by_std:
        return centred
    variance = zeros.index_add(0, group, centred.square()) / (count - 1).clamp(min=1)
    return centred / (variance.sqrt()[group] + eps)


def moment_sums(x: Tensor, mask: Tensor) -> Tensor:
    """`[3]` fp64: number, sum and sum of squares of the tokens of x `[tokens]` where mask `[tokens]` is non-zero.

    Sums of different ranks add up; `mean_and_variance` reads them. fp64, because the variance is a difference of sums.
    """
    kept = torch.where(mask != 0, x, 0.0).double()
    return torch.stack([(mask != 0).sum().double(), kept.sum(), kept.square().sum()])


def mean_and_variance(sums: Tensor) -> tuple[float, float]:
    """(mean, biased variance) of the tokens counted in `moment_sums`; (0, 0) when there is none."""
    count, total, squares = sums.tolist()
    if count == 0:
        return 0.0, 0.0
    mean = total / count
    return mean, max(squares / count - mean * mean, 0.0)


def whiten(x: Tensor, mask: Tensor, *, mean: float, variance: float, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + eps) where mask `[tokens]` is non-zero, else 0.

    The moments are those of all tokens of all ranks, so that neither the number of ranks nor a cut of the batch shows
    in the result (normalisation of advantages: Andrychowicz et al. 2021, arXiv:2006.05990, section 3.5).
    """
    return torch.where(mask != 0, (x - mean) / (variance + eps) ** 0.5, 0.0)
