"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): PPO without a critic, its advantages whitened over the global batch.

Without groups a token's advantage is what is still to come: the score less the KL penalties from this token on, A_t = r
- beta * (sum over i >= t of KL_i) at gamma 1. "REINFORCE++ w/ baseline" takes the mean of its group off each reward
first, and has the KL (k2) in the loss. Both then shift and scale the advantages to mean 0 and variance 1 over all
tokens of the batch (`normalise_advantages`, done with `advantages.whiten` for every estimator alike), and never divide
by the deviation of a group, which depends on the very reward that it scales. The loss is PPO's.
"""

from __future__ import annotations

from hybridflow.algorithms.advantages import AdvantageOptions, Estimate, Rewarded, over_scored_rows
from hybridflow.algorithms.grpo import centred
from hybridflow.algorithms.ragged import discounted_suffix_sum


def reinforce_pp_advantages(rewarded: Rewarded, options: AdvantageOptions) -> Estimate:
    """A_t = sum over k >= 0 of gamma^k r_{t+k}, over the trained tokens of the row."""
    lengths, (rewards,) = rewarded.chained(rewarded.token_rewards)
    return Estimate(rewarded.unchained(discounted_suffix_sum(rewards, lengths, options.gamma)))


def reinforce_pp_baseline_advantages(rewarded: Rewarded, options: AdvantageOptions) -> Estimate:
    """A_i = r_i - mean of its group."""
    return over_scored_rows(rewarded, centred)
