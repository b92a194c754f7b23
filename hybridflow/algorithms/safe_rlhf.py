"""Safe RLHF (Dai et al. 2023, arXiv:2310.12773): reward under a bound on a cost, by a Lagrange multiplier.

A cost model and a cost critic judge the same responses as reward model and critic do. Advantages of both come from GAE
and are combined with the multiplier lambda (eq. 30), which rises while the mean cost is above its bound and falls below
it (eq. 31); the policy loss is PPO's, and a supervised loss on pretraining data keeps what the model knew (PPO-ptx).
Half of the KL penalty is taken off the reward and half is added to the cost (appendix B), so that the combination has
half of it whatever lambda is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from hybridflow.algorithms.advantages import AdvantageOptions, Estimate, Rewarded
from hybridflow.algorithms.losses import Sums, supervised_loss
from hybridflow.algorithms.ppo import gae_advantages
from hybridflow.micro_batch import TokenColumns


def safe_rlhf_advantages(rewarded: Rewarded, options: AdvantageOptions) -> Estimate:
    """(A_r - lambda A_c) / (1 + lambda) with lambda = `options.multiplier` (eq. 30), and the returns of both critics.

    Raises:
        ValueError: `rewarded.cost`, or the values of a critic, are missing, or lambda is negative.
    """
    if rewarded.cost is None:
        raise ValueError("Safe RLHF needs the cost of each response, which has not been computed")
    if not options.multiplier >= 0:
        raise ValueError(f"the Lagrange multiplier is {options.multiplier}; it must be at least 0")
    reward, cost = gae_advantages(rewarded, options), gae_advantages(rewarded.cost, options)
    combined = (reward.advantages - options.multiplier * cost.advantages) / (1.0 + options.multiplier)
    return Estimate(combined, reward.returns, cost_returns=cost.returns)


@dataclass(frozen=True)
class LagrangeMultiplier:
    """lambda, kept as its logarithm to stay positive. Example: `LagrangeMultiplier.of(1.0, lr=0.1).value` is 1.

    Attributes:
        log: ln lambda.
        lr: alpha, the step of ln lambda per unit of cost and lambda.
        limit: d of the paper in its sign here: the mean cost that is still allowed.
        largest: lambda stays within [1 / largest, largest], from where it can come back.
    """

    log: float
    lr: float
    limit: float = 0.0
    largest: float = 1e3

    @classmethod
    def of(cls, value: float, *, lr: float, limit: float = 0.0, largest: float = 1e3) -> LagrangeMultiplier:
        """The multiplier that starts at `value`.

        Raises:
            ValueError: lr is not positive, or value is outside [1 / largest, largest].
        """
        if not (lr > 0 and largest >= 1 and 1 / largest <= value <= largest):
            raise ValueError(f"a multiplier that starts at {value}, with lr {lr} and largest {largest}: lr must be "
                             "positive and the start within [1 / largest, largest], for example 1.0, 0.1 and 1000.0")
        return cls(math.log(value), lr, limit, largest)

    @property
    def value(self) -> float:
        return math.exp(self.log)

    def after(self, mean_cost: float) -> LagrangeMultiplier:
        """That of the next step: ln lambda + lr lambda (mean cost - limit) (eq. 31). `mean_cost` is over the step's
        responses that have a cost; not to be called where none has.

        Raises:
            ValueError: the mean cost is NaN (the multiplier would stay NaN for ever).
        """
        if math.isnan(mean_cost):
            raise ValueError("the mean cost is NaN: a cost of this step is not a number")
        risen = self.log + self.lr * self.value * (mean_cost - self.limit)
        bound = math.log(self.largest)
        return replace(self, log=min(max(risen, -bound), bound))


def pretraining_loss(log_probs: Tensor, columns: TokenColumns, coef: float) -> tuple[Tensor, Sums]:
    """coef times the negative log-probability of pretraining targets (PPO-ptx; Ouyang et al. 2022, arXiv:2203.02155,
    eq. 2), to be added to the policy loss.

    `columns` has weight: that of the pretraining batch by itself. Returns (loss scalar, sums): ptx_loss, before coef.
    """
    loss, sums = supervised_loss(log_probs, columns)
    return coef * loss, {"ptx_loss": sums["supervised_loss"]}
