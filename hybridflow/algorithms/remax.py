"""ReMax (Li et al. 2023, arXiv:2310.10505, algorithm 1): REINFORCE with the greedy answer's reward as the baseline.

Each prompt is answered once more, greedily, and the reward of that answer is taken off those of the sampled ones: a
baseline that depends on the prompt alone, for one generation and no critic. Loss and reduction are REINFORCE's
(`reinforce`, `seq-mean-token-sum`: the gradient of a response's log-prob), the KL is part of the sampled reward.
"""

from __future__ import annotations

from hybridflow.algorithms.advantages import AdvantageOptions, Estimate, Rewarded


def remax_advantages(rewarded: Rewarded, options: AdvantageOptions) -> Estimate:
    """A_i = r_i - (reward of the greedy answer to its prompt); 0 where either is NaN: the row cannot be judged.

    Raises:
        ValueError: `rewarded.baselines` is missing.
    """
    if rewarded.baselines is None:
        raise ValueError("ReMax needs the reward of the greedy answer to each prompt, which has not been computed")
    return Estimate(rewarded.on_tokens((rewarded.row_rewards - rewarded.baselines).nan_to_num(0.0)))
