"""Importance correction for responses that another policy has sampled than the one that learns.

The generator's log-prob of a token differs from the trainer's by rounding (another engine, another precision), or since
its weights were older (asynchronous training). The policy term is weighted by the ratio old / rollout, truncated
(truncated importance sampling: Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you
off-policy RL training") or set to 0 out of bounds (masked). It never touches KL, entropy or value terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from hybridflow.algorithms.kl import LOG_RATIO_BOUND
from hybridflow.algorithms.losses import IMPORTANCE, Sums, given, weighted_sum
from hybridflow.algorithms.policy import old_log_probs
from hybridflow.micro_batch import TokenColumns
from hybridflow.target_rows import TargetRows


class RatioOf(Enum):
    """Whose ratio is the weight of a token: its own, or that of its whole response (the product over its tokens)."""

    TOKEN = "token"
    SEQUENCE = "sequence"


class Bounding(Enum):
    """TRUNCATE: min(ratio, high). MASK: the ratio where low <= ratio <= high, else 0."""

    TRUNCATE = "truncate"
    MASK = "mask"


@dataclass(frozen=True)
class Correction:
    """Example: `Correction(RatioOf.TOKEN, Bounding.TRUNCATE, high=2.0)`.

    Attributes:
        low, high: bounds of the ratio, low in [0, 1] and high at least 1; low is for MASK alone.

    Raises:
        ValueError: a bound is outside its range.
    """

    level: RatioOf
    how: Bounding
    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        if not (0.0 <= self.low <= 1.0 <= self.high):
            raise ValueError(f"an importance ratio is bounded by {self.low} and {self.high}; the bounds must lie in "
                             "[0, 1] and above 1, for example 0.5 and 2.0")

    def apply(self, log_probs: Tensor, columns: TokenColumns, rows: TargetRows) -> tuple[TokenColumns, Sums]:
        """The columns with each token's advantage times its weight, and sums.

        Args:
            log_probs: `[targets]` of the policy in training, in nats.
            columns: weight, advantages, rollout_log_probs; old_log_probs, None where the policy has not changed.
            rows: the row of each target. Ranks with parts of the same rows call it alike.

        Returns:
            (columns, sums): correction_weight and correction_fraction (tokens whose ratio was out of bounds), means
            over tokens; and what `finish_metrics` needs for correction_ess, over tokens or, at SEQUENCE, over rows.
        """
        weight, advantages = given(columns.weight, "weight"), given(columns.advantages, "advantages")
        rollout = given(columns.rollout_log_probs, "rollout_log_probs")
        trained = weight != 0
        log_ratios = torch.where(trained, old_log_probs(log_probs, columns) - rollout, 0.0)
        if self.level is RatioOf.SEQUENCE:
            of_rows, out_of_rows = self._bounded(rows.sums(log_ratios))
            importance, out = rows.to_targets(of_rows), rows.to_targets(out_of_rows)
            moments = _moments(of_rows, (rows.sums(trained.to(of_rows.dtype)) > 0) & rows.counts_here)
        else:
            importance, out = self._bounded(log_ratios)
            moments = _moments(importance, trained)
        return columns.with_columns(advantages=advantages * importance), moments | {
            "correction_weight": weighted_sum(weight, importance),
            "correction_fraction": weighted_sum(weight, out),
        }

    def _bounded(self, log_ratios: Tensor) -> tuple[Tensor, Tensor]:
        """(weights, where the ratio was out of bounds), both of the shape of log_ratios."""
        ratios = log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        if self.how is Bounding.TRUNCATE:
            return ratios.clamp(max=self.high), ratios > self.high
        out = (ratios < self.low) | (ratios > self.high)
        return torch.where(out, 0.0, ratios), out


def _moments(importance: Tensor, counted: Tensor) -> Sums:
    """Number, sum and sum of squares of the weights that count."""
    kept = torch.where(counted, importance, 0.0).double()
    return dict(zip(IMPORTANCE, (counted.sum().double(), kept.sum(), kept.square().sum()), strict=True))
