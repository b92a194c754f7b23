"""One estimator run on a step's rewards: its result measured and, where that is asked for, whitened."""

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
        ValueError: as `estimator`, or the rewards are so large that its formula is not finite.
    """
    estimate = estimator(rewarded, options)
    advantages = estimate.advantages.to(rewarded.token_rewards.dtype)
    if not advantages.isfinite().all():
        raise ValueError(f"algorithm.advantage: advantages are not finite, {_reason(rewarded)}")
    mean, variance = mean_and_variance(rewarded.total(moment_sums(advantages, rewarded.mask)))
    if whitened:
        advantages = whiten(advantages, rewarded.mask, mean=mean, variance=variance)
    return Estimated(replace(estimate, advantages=advantages), mean, variance)


def _reason(rewarded: Rewarded) -> str:
    if rewarded.values is not None and not rewarded.values.isfinite().all():
        return "since the critic's values are not: it has diverged; choose e.g. a lower train.critic_optimizer.lr"
    largest = rewarded.row_rewards.nan_to_num(0.0).abs().max().item()
    return f"and the largest reward is {largest:g}; scale the rewards to about 1"
