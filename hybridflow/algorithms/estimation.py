"""One estimator run on a step's rewards: its result checked, measured and, where that is asked for, whitened."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridflow.algorithms.advantages import (
    AdvantageOptions,
    Estimate,
    Estimator,
    Rewarded,
    mean_and_variance,
    moment_sums,
    whiten,
)


@dataclass(frozen=True)
class Estimated:
    """Attributes:
        estimate: of my tokens.
        mean, variance: of the advantages over all trained tokens of all ranks, before any whitening.
    """

    estimate: Estimate
    mean: float
    variance: float


def estimated(estimator: Estimator, rewarded: Rewarded, options: AdvantageOptions, *, whitened: bool) -> Estimated:
    """What `estimator` says, its advantages whitened over the whole batch where `whitened`. Collective.

    Raises:
        ValueError: a user's estimator returned something else than an Estimate of these tokens, or what is not finite.
    """
    estimate = estimator(rewarded, options)
    if not isinstance(estimate, Estimate):
        raise ValueError(f"algorithm.advantage returned a {type(estimate).__name__}; it must return an Estimate, for "
                         "example Estimate(advantages)")
    if estimate.advantages.shape != rewarded.mask.shape:
        raise ValueError(f"algorithm.advantage returned advantages of shape {tuple(estimate.advantages.shape)}; those "
                         f"of these tokens have {tuple(rewarded.mask.shape)}")
    if not estimate.advantages.isfinite().all():
        raise ValueError("algorithm.advantage returned advantages that are not finite")
    advantages = estimate.advantages.to(rewarded.token_rewards.dtype)
    mean, variance = mean_and_variance(rewarded.total(moment_sums(advantages, rewarded.mask)))
    if whitened:
        advantages = whiten(advantages, rewarded.mask, mean=mean, variance=variance)
    return Estimated(replace(estimate, advantages=advantages), mean, variance)
