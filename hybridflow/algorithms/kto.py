"""The loss of Kahneman-Tversky optimisation, which learns from single answers that are good or bad.

Plain functions of log-ratios of rows. They divide by nothing: whoever adds the rows up knows how many there are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def kto(log_ratios: Tensor, desirable: Tensor, reference_point: Tensor, beta: float, desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0) -> Tensor:
    """lambda_y - v(x, y) of each row (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8).

    With r = log_ratios: lambda_D (1 - sigmoid(beta (r - z0))) where the answer is desirable, else
    lambda_U (1 - sigmoid(beta (z0 - r))).

    Args:
        log_ratios: `[rows]` log pi(y | x) - log pi_ref(y | x) of whole responses, in nats.
        desirable: `[rows]` bool.
        reference_point: z0, a scalar in nats through which no gradient passes (`reference_point`).
        beta: risk aversion, above 0.
        desirable_weight, undesirable_weight: lambda_D, lambda_U.

    Returns:
        `[rows]`.
    """
    gain = beta * (log_ratios - reference_point.detach())
    lost = torch.sigmoid(torch.where(desirable, -gain, gain))  # 1 - sigmoid(x) = sigmoid(-x)
    weights = lost.new_tensor((undesirable_weight, desirable_weight))
    return weights[desirable.long()] * lost


def reference_point(policy: Tensor, reference: Tensor) -> Tensor:
    """z0, the estimate of KL(policy || reference) of a batch: the mean log-ratio of answers to other prompts, not below
    0 (arXiv:2402.01306, beneath eq. 8). Scalar in nats.

    Args:
        policy, reference: `[rows]` log-probs of the mismatched rows of the whole optimizer batch (`mismatched`).
    """
    return (policy - reference).mean().clamp(min=0.0).detach()


def mismatched(prompts: Sequence[Hashable]) -> tuple[int, ...]:
    """For each row the row whose response it is paired with: the next one, in a circle, that answers another prompt
    (the next one where all answer the same). Example: prompts a a b c give 2, 2, 3, 0.
    """
    count = len(prompts)
    return tuple(next((other for step in range(1, count) if prompts[other := (row + step) % count] != prompts[row]),
                      (row + 1) % count) for row in range(count))
