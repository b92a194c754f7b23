"""Dr. GRPO: GRPO done right (Liu et al. 2025, "Understanding R1-Zero-like training", arXiv:2503.20783, section 3).

Two divisions of GRPO are left out, since they bias the gradient: that by the deviation of the group (questions that are
very easy or very hard would weigh more) and that by the length of the response (long wrong answers would be punished
less). So advantages are only centred, and the reduction is `constant-length` (appendix A). The loss is PPO's; no KL.
"""

from __future__ import annotations

from hybridflow.algorithms.advantages import AdvantageOptions, Estimate, Rewarded, over_scored_rows
from hybridflow.algorithms.grpo import centred


def dr_grpo_advantages(rewarded: Rewarded, options: AdvantageOptions) -> Estimate:
    """A_i = r_i - mean of its group."""
    return over_scored_rows(rewarded, centred)
