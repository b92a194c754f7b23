"""GRPO: group relative policy optimisation (DeepSeekMath, Shao et al. 2024, arXiv:2402.03300, section 4.1).

A response's advantage is its reward relative to those of the other responses to the same prompt (outcome supervision,
section 4.1.2); no critic. The policy loss is PPO's (`ppo.clipped_policy_loss`, eq. 3), the KL to the reference is a
term of the loss (eq. 4, k3) and `seq-mean-token-mean` is the paper's reduction.
"""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages import AdvantageOptions, Estimate, Rewarded, over_scored_rows
from hybridflow.algorithms.groups import group_statistics


def group_relative(row_rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean of its group) / (standard deviation of its group + eps), with n - 1 in the deviation.

    A group whose rewards are all equal, hence also a group of one, says nothing: exactly 0.

    Args:
        row_rewards: `[rows]`, one reward a response.
        group_ids: `[rows]` int64, equal for the responses to one prompt; any values, in any order.
        eps: added to the deviation, in units of the reward.

    Returns:
        `[rows]` advantages, for every token of the row.

    Raises:
        ValueError: the shapes differ.
    """
    groups = group_statistics(row_rewards, group_ids)
    return groups.centred / (groups.deviations() + eps)


def centred(row_rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`[rows]`: r_i - mean of its group. Arguments and error as `group_relative`."""
    return group_statistics(row_rewards, group_ids).centred


def grpo_advantages(rewarded: Rewarded, options: AdvantageOptions) -> Estimate:
    """Group-relative advantages, divided by the group's deviation where `options.std_normalise` says so."""
    return over_scored_rows(rewarded, group_relative if options.std_normalise else centred)
