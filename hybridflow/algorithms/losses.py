"""Losses on target tokens that algorithms share: clipped value, KL, entropy, supervised; and the metrics of all losses.

Every loss is `(weight * token_loss).sum()` with `columns.weight` from `reduction`, and every metric is a sum in fp64:
micro-batches and data-parallel ranks add up, and `finish_metrics` makes the totals readable. No loss divides by what it
happens to see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.kl import KlEstimator, kl
from hybridflow.micro_batch import TokenColumns

Sums = dict[str, Tensor]

WEIGHT = "weight"
# Averages over tokens under the loss weights: their sums are divided by the sum of the weights in the end. All other
# metrics are parts of the loss and stay as they are.
AVERAGES = frozenset({
    "ratio", "clip_fraction", "dual_clip_fraction", "approx_kl", "entropy", "kl", "rollout_gap",
    "value", "value_error", "value_clip_fraction", "return", "nll", "correction_weight", "correction_fraction",
})  # fmt: skip
# Only inputs of the explained variance.
_MOMENTS = ("return_squared", "residual", "residual_squared")
# Number, sum and sum of squares of importance weights: only inputs of the effective sample size.
IMPORTANCE = ("importance_count", "importance_sum", "importance_squares")


@dataclass(frozen=True)
class Clip:
    """Bounds of the policy ratio. Example: `Clip(low=0.2, high=0.28)` lets the ratio act within [0.8, 1.28].

    Attributes:
        low, high: distance of the bounds from 1, below and above; low in [0, 1] (1: no lower bound), high at least 0.
        dual: bound c > 1 of the ratio where the advantage is negative (Ye et al. 2020), None without.

    Raises:
        ValueError: a bound is outside its range.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= 1.0:
            raise ValueError(f"clip low is {self.low}; it must lie in [0, 1], for example 0.2")
        if not self.high >= 0.0:
            raise ValueError(f"clip high is {self.high}; it must be at least 0, for example 0.2")
        if self.dual is not None and not self.dual > 1.0:
            raise ValueError(f"clip dual is {self.dual}; it must be null or exceed 1, for example 3.0")


def value_loss(values: Tensor, columns: TokenColumns, value_clip: float | None) -> tuple[Tensor, Sums]:
    """Half the squared error of the values to the returns, clipped around the old values.

    max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2 with c = value_clip (the implementation of PPO that
    Engstrom et al. 2020, arXiv:2005.12729, section 3 describe); without clip (v - R)^2 / 2.

    Args:
        values: `[targets]` of the critic in training, in units of the return.
        columns: weight, returns, and old_values where value_clip is given.
        value_clip: c in units of the return, None without.

    Returns:
        (loss scalar, sums): value_loss, value and return (means), value_error (mean of (v - R)^2),
        value_clip_fraction, and what `finish_metrics` needs for explained_variance.
    """
    weight, returns = given(columns.weight, "weight"), given(columns.returns, "returns")
    residual = values - returns
    error = residual.square()
    sums: Sums = {}
    token_loss = error
    if value_clip is not None:
        old = given(columns.old_values, "old_values")
        clipped_error = (old + (values - old).clamp(-value_clip, value_clip) - returns).square()
        clipped = (clipped_error > error) & ((values - old).abs() > value_clip)
        sums["value_clip_fraction"] = weighted_sum(weight, clipped)
        token_loss = torch.maximum(error, clipped_error)
    loss = 0.5 * (weight * token_loss).sum()
    sums |= {
        WEIGHT: weighted_sum(weight, torch.ones_like(weight)),
        "value_loss": loss.detach().double(),
        "value": weighted_sum(weight, values),
        "value_error": weighted_sum(weight, error),
        "return": weighted_sum(weight, returns),
        "return_squared": weighted_sum(weight, returns.double().square()),
        "residual": weighted_sum(weight, residual),
        "residual_squared": weighted_sum(weight, residual.double().square()),
    }
    return loss, sums


def kl_loss(log_probs: Tensor, columns: TokenColumns, estimator: KlEstimator) -> tuple[Tensor, Sums]:
    """The divergence from the reference as a loss, before its coefficient (GRPO, arXiv:2402.03300, eq. 3-4, with k3).

    `columns` has weight and ref_log_probs. Returns (loss scalar in nats, sums): kl_loss, and kl (mean over tokens).
    """
    weight, reference = given(columns.weight, "weight"), given(columns.ref_log_probs, "ref_log_probs")
    divergence = kl(log_probs, reference, estimator)
    loss = (weight * divergence).sum()
    return loss, {
        WEIGHT: weighted_sum(weight, torch.ones_like(weight)),
        "kl_loss": loss.detach().double(),
        "kl": weighted_sum(weight, divergence),
    }


def entropy_bonus(entropy: Tensor, columns: TokenColumns) -> tuple[Tensor, Sums]:
    """Minus the entropy `[targets]` (nats) as a loss, before its coefficient (PPO, arXiv:1707.06347, eq. 9).

    `columns` has weight. Returns (loss scalar, sums): entropy (mean).
    """
    weight = given(columns.weight, "weight")
    return -(weight * entropy).sum(), {
        WEIGHT: weighted_sum(weight, torch.ones_like(weight)),
        "entropy": weighted_sum(weight, entropy),
    }


def supervised_loss(log_probs: Tensor, columns: TokenColumns) -> tuple[Tensor, Sums]:
    """Negative log-probability of the targets, in nats.

    `columns` has weight. Returns (loss scalar, sums): supervised_loss, nll (mean).
    """
    weight = given(columns.weight, "weight")
    loss = -(weight * log_probs).sum()
    return loss, {
        WEIGHT: weighted_sum(weight, torch.ones_like(weight)),
        "supervised_loss": loss.detach().double(),
        "nll": weighted_sum(weight, -log_probs),
    }


def finish_metrics(sums: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Readable metrics from the sums of a whole optimizer batch (micro-batches and data-parallel ranks added up).

    Parts of the loss stay as they are; averages are divided by the sum of the weights (0 where nothing was trained);
    explained_variance = 1 - Var(return - value) / Var(return), absent where the return does not vary.
    correction_ess = (sum of weights)^2 / (number * sum of their squares), 0 where all weights are 0.
    """
    totals = {name: float(value) for name, value in sums.items()}
    weight = totals.pop(WEIGHT)
    average = {name: total / weight if weight else 0.0 for name, total in totals.items()}
    finished = {name: average[name] if name in AVERAGES else total for name, total in totals.items()}
    if "residual" in totals:
        for name in _MOMENTS:
            finished.pop(name)
        of_returns = average["return_squared"] - average["return"] ** 2
        of_residuals = average["residual_squared"] - average["residual"] ** 2
        if of_returns > 1e-12 * average["return_squared"]:  # the difference of two equal sums is rounding, not variance
            finished["explained_variance"] = 1.0 - of_residuals / of_returns
    if IMPORTANCE[0] in totals:
        count, total, squares = (finished.pop(name) for name in IMPORTANCE)
        finished["correction_ess"] = total * total / (count * squares) if squares else 0.0
    return finished


def weighted_sum(weight: Tensor, x: Tensor) -> Tensor:
    """A metric: the weighted sum of x `[targets]` in fp64, without gradient."""
    return (weight.detach().double() * x.detach().double()).sum()


def given(column: Tensor | None, name: str) -> Tensor:
    """The column, which this loss needs.

    Raises:
        ValueError: it has not been computed.
    """
    if column is None:
        raise ValueError(f"this loss needs the column {name!r}, which has not been computed")
    return column
