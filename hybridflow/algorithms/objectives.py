"""What the actor and the critic minimise: the losses of `losses` with the coefficients of the config.

Takes plain tensors and the columns of a micro-batch; the engine calls it once per micro-batch and adds the results up.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hybridflow.algorithms.kl import KlEstimator
from hybridflow.algorithms.losses import Clip, Sums, entropy_bonus, kl_loss, policy_loss, value_loss
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
    """

    clip: Clip
    entropy_coef: float = 0.0
    kl_estimator: KlEstimator | None = None
    kl_coef: float = 0.0

    def __call__(self, log_probs: Tensor, entropy: Tensor | None, columns: TokenColumns,
                 rows: TargetRows) -> tuple[Tensor, Sums]:
        """(loss scalar, sums) of `[targets]` log_probs and entropy (None: not computed).

        Raises:
            ValueError: a column or the entropy is needed and missing.
        """
        if entropy is None and self.entropy_coef != 0:
            raise ValueError(f"entropy_coef is {self.entropy_coef}, but the model did not compute the entropy")
        loss, sums = policy_loss(log_probs, columns, self.clip)
        if entropy is not None:
            bonus, more = entropy_bonus(entropy, columns)
            sums |= more
            if self.entropy_coef != 0:  # 0 * an infinite entropy gradient would be NaN
                loss = loss + self.entropy_coef * bonus
        if self.kl_estimator is not None:
            divergence, more = kl_loss(log_probs, columns, self.kl_estimator)
            loss, sums = loss + self.kl_coef * divergence, sums | more
        return loss, sums | {"loss": loss.detach().double()}


@dataclass(frozen=True)
class CriticObjective:
    """coef * clipped value loss. Example: `CriticObjective(value_clip=0.2, coef=0.5)`; value_clip None: no clip."""

    value_clip: float | None
    coef: float = 1.0

    def __call__(self, values: Tensor, columns: TokenColumns) -> tuple[Tensor, Sums]:
        """(loss scalar, sums) of `[targets]` values. Raises ValueError where a column is missing."""
        loss, sums = value_loss(values, columns, self.value_clip)
        return self.coef * loss, sums
