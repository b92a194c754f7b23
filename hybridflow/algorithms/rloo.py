"""RLOO: REINFORCE leave-one-out ("Back to basics", Ahmadian et al. 2024, arXiv:2402.14740, section 3; Kool et al.
2019).

Each of the k responses to a prompt has the mean reward of the other k - 1 as its baseline, which is unbiased since it
does not depend on the response. A whole response is one action: its log-prob is the sum of its tokens' (reduction
`seq-mean-token-sum`), the KL to the reference is part of its reward, and the loss is REINFORCE's (`reinforce`).
"""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.advantages import AdvantageOptions, Estimate, Rewarded, over_scored_rows
from hybridflow.algorithms.groups import group_statistics


def leave_one_out(row_rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = r_i - (sum over j != i of r_j) / (k - 1), the same as k / (k - 1) (r_i - mean of all k).

    A response that is alone in its group has no baseline: 0. Arguments, result and error as `grpo.group_relative`.
    """
    groups = group_statistics(row_rewards, group_ids)
    counts = groups.counts[groups.of_row]
    return groups.centred * counts / (counts - 1).clamp(min=1)


def rloo_advantages(rewarded: Rewarded, options: AdvantageOptions) -> Estimate:
    """Leave-one-out advantages."""
    return over_scored_rows(rewarded, leave_one_out)
