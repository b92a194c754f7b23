"""PPO: generalised advantage estimation for a critic, and the clipped policy loss.

GAE: Schulman et al. 2016, arXiv:1506.02438, eq. 11-16. The loss: Schulman et al. 2017, arXiv:1707.06347, eq. 7, with
the bounds apart (clip-higher of DAPO, arXiv:2503.14476, eq. 10) and the dual clip (Ye et al. 2020, arXiv:1912.09729,
eq. 5). The value loss, the entropy bonus and the KL are `losses`'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import AdvantageOptions, Estimate, Rewarded
from hybridflow.algorithms.kl import bounded_log_ratio
from hybridflow.algorithms.losses import Clip, Sums, given
from hybridflow.algorithms.policy import clipped_surrogate, old_log_probs, summed
from hybridflow.algorithms.ragged import check_lengths, discounted_suffix_sum, next_in_row
from hybridflow.micro_batch import TokenColumns
from hybridflow.target_rows import TargetRows


def gae(
    rewards: Tensor, values: Tensor, lengths: tuple[int, ...], *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation on packed rows.

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


def gae_advantages(rewarded: Rewarded, options: AdvantageOptions) -> Estimate:
    """GAE over the trained tokens alone: the token after one is the next that is trained, however many lie between.

    Raises:
        ValueError: `rewarded.values` is missing.
    """
    if rewarded.values is None:
        raise ValueError("generalised advantage estimation needs the values of a critic, which have not been computed")
    lengths, (rewards, values) = rewarded.chained(rewarded.token_rewards, rewarded.values)
    advantages, returns = gae(rewards, values, lengths, gamma=options.gamma, lam=options.lam)
    return Estimate(rewarded.unchained(advantages), rewarded.unchained(returns))


def clipped_policy_loss(log_probs: Tensor, columns: TokenColumns, rows: TargetRows, clip: Clip) -> tuple[Tensor, Sums]:
    """The clipped surrogate, negated, to be minimised.

    max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(log_probs - old); where A < 0 and `clip.dual` = c, at most
    -A c.

    Args:
        log_probs: `[targets]` of the policy in training, in nats.
        columns: weight, advantages; old_log_probs, None where the policy has not changed since the rollout.
        rows: not looked at; every token has a ratio of its own.
        clip: the bounds.

    Returns:
        (loss scalar, sums): those of `policy.summed`, ratio, clip_fraction (tokens whose clipped term is the larger)
        and dual_clip_fraction.
    """
    advantages = given(columns.advantages, "advantages")
    ratio = bounded_log_ratio(log_probs, old_log_probs(log_probs, columns)).exp()
    token_loss, clipped = clipped_surrogate(ratio, advantages, clip)
    averages = {"ratio": ratio, "clip_fraction": clipped}
    if clip.dual is not None:
        worst = torch.where(advantages < 0, -advantages * clip.dual, torch.inf)
        averages["dual_clip_fraction"] = token_loss > worst
        token_loss = torch.minimum(token_loss, worst)
    return summed(token_loss, log_probs, columns, **averages)
