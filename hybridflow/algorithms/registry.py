"""Every advantage estimator and policy loss by name: where its function is, and what it needs.

Plain tables, read and never written: an estimator or loss of a user's own is named in the config as file.py:function
(`functions`). Imports no torch, so that a config is checked without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Need(Enum):
    """What an estimator needs beside the rewards of the responses."""

    CRITIC = "a critic"
    GROUP = "two or more samples of a prompt"
    GREEDY_ANSWER = "the reward of the greedy answer to each prompt"
    COST = "a cost model and its critic"


@dataclass(frozen=True)
class AdvantageEntry:
    """Example: `AdvantageEntry("ppo", "gae_advantages", frozenset({Need.CRITIC}), frozenset({"gamma", "lam"}))`.

    Attributes:
        module, function: hybridflow.algorithms.`module` has it.
        needs: what it cannot do without.
        options: the fields of `AdvantageOptions` that it reads.
    """

    module: str
    function: str
    needs: frozenset[Need] = frozenset()
    options: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PolicyLossEntry:
    """Example: `PolicyLossEntry("gspo", "gspo_policy_loss", clip=(3e-4, 4e-4))`.

    Attributes:
        module, function: hybridflow.algorithms.`module` has it.
        clip: low and high of its paper; None where it clips nothing.
        has_dual_clip: whether it reads the dual bound too.
    """

    module: str
    function: str
    clip: tuple[float, float] | None = None
    has_dual_clip: bool = False


_GROUP = frozenset({Need.GROUP})

ADVANTAGES: Mapping[str, AdvantageEntry] = MappingProxyType({
    "gae": AdvantageEntry("ppo", "gae_advantages", frozenset({Need.CRITIC}), frozenset({"gamma", "lam"})),
    "grpo": AdvantageEntry("grpo", "grpo_advantages", _GROUP, frozenset({"std_normalise"})),
    "dr_grpo": AdvantageEntry("dr_grpo", "dr_grpo_advantages", _GROUP),
    "rloo": AdvantageEntry("rloo", "rloo_advantages", _GROUP),
    "reinforce_pp": AdvantageEntry("reinforce_pp", "reinforce_pp_advantages", options=frozenset({"gamma"})),
    "reinforce_pp_baseline": AdvantageEntry("reinforce_pp", "reinforce_pp_baseline_advantages", _GROUP),
    "remax": AdvantageEntry("remax", "remax_advantages", frozenset({Need.GREEDY_ANSWER})),
    "safe_rlhf": AdvantageEntry("safe_rlhf", "safe_rlhf_advantages", frozenset({Need.CRITIC, Need.COST}),
                                frozenset({"gamma", "lam", "multiplier"})),
})

# CISPO's paper names no bounds: none below (1 - 1 = 0), and ratios up to 5, among those that ScaleRL (arXiv:2510.13786)
# found to be as good as each other.
POLICY_LOSSES: Mapping[str, PolicyLossEntry] = MappingProxyType({
    "ppo": PolicyLossEntry("ppo", "clipped_policy_loss", (0.2, 0.2), has_dual_clip=True),
    "reinforce": PolicyLossEntry("reinforce", "reinforce_policy_loss"),
    "gspo": PolicyLossEntry("gspo", "gspo_policy_loss", (3e-4, 4e-4)),
    "gspo_token": PolicyLossEntry("gspo", "gspo_token_policy_loss", (3e-4, 4e-4)),
    "cispo": PolicyLossEntry("cispo", "cispo_policy_loss", (1.0, 4.0)),
})
