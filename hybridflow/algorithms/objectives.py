"""What the actor and the critic minimise: a policy loss and the terms of `losses` with the coefficients of the config.

Takes plain tensors and the columns of a micro-batch; the engine calls it once per micro-batch and adds the results up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.correction import Correction
from hybridflow.algorithms.kl import KlEstimator
from hybridflow.algorithms.losses import WEIGHT, Clip, Sums, entropy_bonus, given, kl_loss, value_loss, weighted_sum
from hybridflow.algorithms.policy import PolicyLoss
from hybridflow.algorithms.ppo import clipped_policy_loss
from hybridflow.algorithms.safe_rlhf import pretraining_loss
from hybridflow.micro_batch import TokenColumns
from hybridflow.target_rows import TargetRows


@dataclass(frozen=True)
class ActorObjective:
    """policy loss + kl_coef * KL - entropy_coef * entropy. Example: `ActorObjective(Clip(), entropy_coef=0.01)`.

    Attributes:
        clip: bounds of the policy ratio.
        entropy_coef: 0: the entropy is not part of the loss (it is still a metric where it was computed).
        kl_estimator: the KL to the reference as a loss term; None where it is charged in the reward or not at all.
        kl_coef: its coefficient, in units of the advantage per nat.
        policy_loss: a plain function (`policy`); PPO's by default.
        correction: weighs the policy term by the ratio of trainer to generator; None leaves it as it is.
        pretrain_coef: of a supervised loss on the tokens that have a `pretrain_weight`; 0: there are none.
    """

    clip: Clip
    entropy_coef: float = 0.0
    kl_estimator: KlEstimator | None = None
    kl_coef: float = 0.0
    policy_loss: PolicyLoss = clipped_policy_loss
    correction: Correction | None = None
    pretrain_coef: float = 0.0

    def __call__(self, log_probs: Tensor, entropy: Tensor | None, columns: TokenColumns,
                 rows: TargetRows) -> tuple[Tensor, Sums]:
        """(loss scalar, sums) of `[targets]` log_probs and entropy (None: not computed).

        Raises:
            ValueError: a column or the entropy is needed and missing.
        """
        if entropy is None and self.entropy_coef != 0:
            raise ValueError(f"entropy_coef is {self.entropy_coef}, but the model did not compute the entropy")
        loss, sums = self._policy_term(log_probs, columns, rows)
        if entropy is not None:
            bonus, more = entropy_bonus(entropy, columns)
            sums |= more
            if self.entropy_coef != 0:  # 0 * an infinite entropy gradient would be NaN
                loss = loss + self.entropy_coef * bonus
        if self.kl_estimator is not None:
            divergence, more = kl_loss(log_probs, columns, self.kl_estimator)
            loss, sums = loss + self.kl_coef * divergence, sums | more
        if self.pretrain_coef != 0:
            weight = given(columns.pretrain_weight, "pretrain_weight")
            term, more = pretraining_loss(log_probs, columns.with_columns(weight=weight), self.pretrain_coef)
            loss, sums = loss + term, sums | more
        return loss, sums | {"loss": loss.detach().double()}

    def _policy_term(self, log_probs: Tensor, columns: TokenColumns, rows: TargetRows) -> tuple[Tensor, Sums]:
        """The policy loss, corrected; a user's function need not know of the weight that averages are divided by."""
        weight = given(columns.weight, "weight")
        sums = {WEIGHT: weighted_sum(weight, torch.ones_like(weight))}
        if self.correction is not None:
            columns, corrected = self.correction.apply(log_probs, columns, rows)
            sums |= corrected
        loss, more = self.policy_loss(log_probs, columns, rows, self.clip)
        return loss, {**more, **sums}


@dataclass(frozen=True)
class CriticObjective:
    """coef * clipped value loss. Example: `CriticObjective(value_clip=0.2, coef=0.5)`; value_clip None: no clip."""

    value_clip: float | None
    coef: float = 1.0

    def __call__(self, values: Tensor, columns: TokenColumns) -> tuple[Tensor, Sums]:
        """(loss scalar, sums) of `[targets]` values. Raises ValueError where a column is missing."""
        loss, sums = value_loss(values, columns, self.value_clip)
        return self.coef * loss, sums
