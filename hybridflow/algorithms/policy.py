"""What every policy loss takes, and the metrics that they share. The losses are in the files of their algorithms.

A policy loss is a plain function `(log_probs, columns, rows, clip) -> (loss scalar, sums)` and obeys two rules: it is
`(columns.weight * token_loss).sum()`, so that micro-batches, context parts and replicas add up; and it is proportional
to `columns.advantages` scaled by a positive number, which is how an importance correction reaches it (`correction`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridflow.algorithms.kl import KlEstimator, kl
from hybridflow.algorithms.losses import WEIGHT, Clip, Sums, given, weighted_sum
from hybridflow.micro_batch import TokenColumns
from hybridflow.target_rows import TargetRows

PolicyLoss = Callable[[Tensor, TokenColumns, TargetRows, Clip], tuple[Tensor, Sums]]


def old_log_probs(log_probs: Tensor, columns: TokenColumns) -> Tensor:
    """`[targets]` of the policy before this step's updates, without gradient. Where that is the policy itself (one
    optimizer step a rollout, old_log_probs None) it is log_probs, so that a ratio is exactly 1 and has its gradient.
    """
    return log_probs.detach() if columns.old_log_probs is None else columns.old_log_probs


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """(token losses `[targets]`, where the clipped term is the larger) of max(-A r, -A clip(r, 1 - low, 1 + high))."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def summed(token_loss: Tensor, log_probs: Tensor, columns: TokenColumns, **averages: Tensor) -> tuple[Tensor, Sums]:
    """(the loss of these token losses `[targets]`, its sums).

    The sums: policy_loss, approx_kl (k3 of old to new policy, nats), rollout_gap where there are rollout_log_probs
    (mean absolute difference of old and rollout, nats), and `averages` `[targets]` by name, each a mean over tokens.
    """
    weight, old = given(columns.weight, "weight"), old_log_probs(log_probs, columns)
    loss = (weight * token_loss).sum()
    sums = {
        WEIGHT: weighted_sum(weight, torch.ones_like(weight)),
        "policy_loss": loss.detach().double(),
        "approx_kl": weighted_sum(weight, kl(old, log_probs, KlEstimator.K3)),
    }
    if columns.rollout_log_probs is not None:
        sums["rollout_gap"] = weighted_sum(weight, (old - columns.rollout_log_probs).abs())
    return loss, sums | {name: weighted_sum(weight, of_tokens) for name, of_tokens in averages.items()}
