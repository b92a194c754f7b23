"""Divergence from a reference policy: the estimators k1, k2, k3, and the coefficient of its penalty.

All are estimates of KL(policy || reference) from tokens sampled by the policy, in nats per token. Never runs a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

# exp(20) = 5e8. A larger ratio of two probabilities of a sampled token is numerical debris; exp would overflow to inf
# in fp32, and inf times the zero weight of a token that is not trained is NaN. Beyond the bound the gradient is 0.
LOG_RATIO_BOUND = 20.0


class KlEstimator(Enum):
    """With d = log policy - log reference of the sampled token (Schulman 2020, "Approximating KL divergence").

    K1: d. Unbiased, can be negative; as a loss its expected gradient is 0, so it belongs in the reward.
    K2: d^2 / 2. Biased, but as an on-policy loss its expected gradient is that of the KL.
    K3: exp(-d) - 1 + d. Unbiased, never negative.
    """

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


def bounded_log_ratio(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """log_probs - other_log_probs `[tokens]`, held within +-LOG_RATIO_BOUND (gradient 0 outside)."""
    return (log_probs - other_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def kl(log_probs: Tensor, ref_log_probs: Tensor, estimator: KlEstimator) -> Tensor:
    """`[tokens]`: the estimate for each token, in nats, with the gradient of the estimator's formula to `log_probs`."""
    d = bounded_log_ratio(log_probs, ref_log_probs)
    if estimator is KlEstimator.K1:
        return d
    if estimator is KlEstimator.K2:
        return 0.5 * d.square()
    return torch.expm1(-d) + d  # expm1: for small d, exp(-d) - 1 would lose the digits that matter


@dataclass(frozen=True)
class FixedKl:
    """A coefficient that stays. Example: `FixedKl(0.05).after(3.0).coef` is 0.05."""

    coef: float

    def after(self, observed_kl: float) -> FixedKl:
        """The controller of the next step, whatever KL was observed."""
        return self


@dataclass(frozen=True)
class AdaptiveKl:
    """A coefficient that steers the KL to a target (Ziegler et al. 2019, section 2.2).

    e = clip(KL / target - 1, -0.2, 0.2) and coef <- coef (1 + gain e). `observed_kl` and `target` must be in one unit:
    the paper's is nats per sequence. Example: `AdaptiveKl(0.1, target=6.0).after(12.0).coef` is 0.102.

    Attributes:
        coef: the coefficient of this step.
        target: the KL aimed at.
        gain: K_beta of the paper, per update.

    Raises:
        ValueError: coef or target is not positive, or an observed KL is NaN (the coefficient would stay NaN for ever).
    """

    coef: float
    target: float
    gain: float = 0.1

    def __post_init__(self) -> None:
        if not (self.coef > 0 and self.target > 0):
            raise ValueError(
                f"kl coef {self.coef} and target {self.target} must be positive for an adaptive coefficient, "
                "for example coef 0.1 and target 6.0"
            )

    def after(self, observed_kl: float) -> AdaptiveKl:
        """The controller of the next step. Not to be called for a step in which no token was trained."""
        if math.isnan(observed_kl):
            raise ValueError("the observed KL is NaN: a log-probability of this step is not a number")
        error = min(max(observed_kl / self.target - 1.0, -0.2), 0.2)
        return AdaptiveKl(self.coef * (1.0 + self.gain * error), self.target, self.gain)


KlController = FixedKl | AdaptiveKl
