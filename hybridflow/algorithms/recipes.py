"""The algorithms by name: which estimator, policy loss and settings make each one, as its paper has them.

Data alone. Whatever a config says itself goes before what is here (`config.recipe`). PPO and GRPO keep what they always
had in this code, which for GRPO is not its paper's: `token-mean`, and no KL unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hybridflow.config.words import KLEstimatorName, KLWhere, LossReduction


@dataclass(frozen=True)
class Recipe:
    """Example: `RECIPES["rloo"].policy_loss` is "reinforce".

    Attributes:
        paper: arXiv id.
        advantage, policy_loss: names in the tables of `registry`.
        reduction, kl_where, kl_estimator, whiten: what the config's keys of these names are where they are null.
        clip: low and high where they are not the policy loss's own.
        overlong_fraction: the part of the length limit over which a response's reward falls (DAPO); None: none.
        resample_rounds: rounds of generation, at most, in which prompts without a signal are replaced; 0: none are.
    """

    paper: str
    advantage: str
    policy_loss: str
    reduction: LossReduction = LossReduction.TOKEN_MEAN
    kl_where: KLWhere = KLWhere.NONE
    kl_estimator: KLEstimatorName = KLEstimatorName.K1
    whiten: bool = False
    clip: tuple[float, float] | None = None
    overlong_fraction: float | None = None
    resample_rounds: int = 0


_OF_SEQUENCES = LossReduction.SEQ_MEAN_TOKEN_SUM

RECIPES: Mapping[str, Recipe] = MappingProxyType({
    "ppo": Recipe("1707.06347", "gae", "ppo", whiten=True),
    "grpo": Recipe("2402.03300", "grpo", "ppo"),
    "dr_grpo": Recipe("2503.20783", "dr_grpo", "ppo", LossReduction.CONSTANT_LENGTH),
    # L_max 20480 and L_cache 4096 of the paper: a fifth.
    "dapo": Recipe("2503.14476", "grpo", "ppo", clip=(0.2, 0.28), overlong_fraction=0.2, resample_rounds=10),
    "rloo": Recipe("2402.14740", "rloo", "reinforce", _OF_SEQUENCES, KLWhere.REWARD),
    "reinforce_pp": Recipe("2501.03262", "reinforce_pp", "ppo", kl_where=KLWhere.REWARD, whiten=True),
    "reinforce_pp_baseline": Recipe("2501.03262", "reinforce_pp_baseline", "ppo", kl_where=KLWhere.LOSS,
                                    kl_estimator=KLEstimatorName.K2, whiten=True),
    "remax": Recipe("2310.10505", "remax", "reinforce", _OF_SEQUENCES, KLWhere.REWARD),
    "gspo": Recipe("2507.18071", "grpo", "gspo", LossReduction.SEQ_MEAN_TOKEN_MEAN),
    "cispo": Recipe("2506.13585", "grpo", "cispo"),
    "safe_rlhf": Recipe("2310.12773", "safe_rlhf", "ppo", kl_where=KLWhere.REWARD),
})
