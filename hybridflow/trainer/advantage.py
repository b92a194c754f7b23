"""From scores to advantages on the rows at home, with moments over all ranks.

Owns what scores (and costs) become before an estimator sees them: punishment for length, KL penalty, one reward a row
and one a token. Which estimator that is, it is told. Rows whose score is NaN (their reward failed) are not trained:
they get `loss_mask` 0 and count in no mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import AdvantageOptions, Estimator, Rewarded
from hybridflow.algorithms.dapo import soft_overlong_punishment
from hybridflow.algorithms.estimation import estimated
from hybridflow.algorithms.kl import FixedKl, KlController, KlEstimator, kl
from hybridflow.algorithms.ragged import at_last_token, row_sums, to_tokens
from hybridflow.batch import Batch
from hybridflow.crew import Crew

Metrics = dict[str, float]


def trained_tokens(batch: Batch, crew: Crew) -> Tensor:
    """`[response tokens of my home rows]` fp32: 1.0 where the row has a score, 0.0 where its reward failed or the batch
    has a loss_mask that says so.
    """
    assert batch.scores is not None
    scores = batch.scores[list(batch.home[crew.rank])]
    scored = to_tokens((~scores.isnan()).to(torch.float32), batch.home_lengths(crew.rank))
    mask = batch.columns.loss_mask
    return scored if mask is None else torch.where(mask != 0, scored, 0.0)


@dataclass
class KlPenalty:
    """KL to the reference, subtracted from each token's reward (Ziegler et al. 2019, arXiv:1909.08593, eq. 2, with k1).
    `controller` changes from step to step.
    """

    estimator: KlEstimator
    controller: KlController = field(default_factory=lambda: FixedKl(0.0))

    def of_tokens(self, batch: Batch, mask: Tensor, crew: Crew) -> tuple[Tensor, Metrics]:
        """`[tokens]` what trained tokens lose (coefficient times KL), and the KL per token; an adaptive coefficient
        moves by the KL per rollout. Collective.
        """
        policy = batch.columns.old_log_probs
        policy = batch.columns.rollout_log_probs if policy is None else policy
        reference = batch.columns.ref_log_probs
        assert policy is not None and reference is not None and batch.scores is not None
        coef = self.controller.coef
        divergence = torch.where(mask != 0, kl(policy, reference, self.estimator).detach(), 0.0)
        sums = torch.stack([divergence.double().sum(), mask.double().sum()])
        total, tokens = crew.sum(sums).tolist()
        if tokens:
            self.controller = self.controller.after(total / int((~batch.scores.isnan()).sum()))
        return coef * divergence, {"policy/kl_reference": total / max(tokens, 1.0), "policy/kl_coef": coef}


@dataclass(frozen=True)
class SoftOverlong:
    """Responses near the length limit lose up to 1 reward (DAPO). Example: `SoftOverlong(max_length=64, buffer=12)`."""

    max_length: int
    buffer: int

    def punishment(self, batch: Batch) -> Tensor:
        """`[rows]` fp64, at most 0."""
        assert batch.scores is not None
        lengths = torch.tensor(batch.response_lengths, device=batch.scores.device)
        return soft_overlong_punishment(lengths, max_length=self.max_length, buffer=self.buffer)


@dataclass(frozen=True)
class Costs:
    """What a cost model and its critic say of the responses (Safe RLHF).

    Attributes:
        scores: `[rows]` fp64 on every rank, NaN where there is none: such a row is not trained.
        values: `[response tokens of my home rows]` of the cost critic.
        multiplier: lambda of this step (`LagrangeMultiplier.value`).
    """

    scores: Tensor
    values: Tensor
    multiplier: float


@dataclass
class Advantages:
    """Scores, less what is charged, through an estimator.

    Attributes:
        estimator, options: the formula (`algorithms.registry`, or a user's) and its numbers.
        whitened: shift and scale the advantages of the batch to mean 0 and variance 1 over its trained tokens.
        penalty: the KL charged in the reward; None where none is.
        overlong: the punishment for length; None without.
    """

    estimator: Estimator
    options: AdvantageOptions = AdvantageOptions()
    whitened: bool = False
    penalty: KlPenalty | None = None
    overlong: SoftOverlong | None = None

    def __call__(self, batch: Batch, crew: Crew, baselines: Tensor | None = None) -> tuple[Batch, Metrics]:
        """The batch with advantages, returns where there is a critic, and loss_mask; and metrics. Collective.

        Args:
            batch: with scores, rollout_log_probs, and what the estimator and the penalty need.
            baselines: `[rows]` fp64 on every rank, the score of the greedy answer to each row's prompt, where the
                estimator needs it (ReMax). A row whose baseline is NaN is not trained.
        """
        batch = batch if baselines is None else _without(batch, baselines.isnan())
        charge, metrics = self._charge(batch, crew)
        rewarded = _judged(batch, crew, self._scores(batch), batch.columns.old_values, charge, -1.0)
        batch, _, estimated_metrics = self._estimate(batch, replace(rewarded, baselines=baselines), self.options)
        return batch, metrics | estimated_metrics

    def with_costs(self, batch: Batch, crew: Crew, costs: Costs) -> tuple[Batch, Batch, Metrics]:
        """The same under a bound on a cost: (the batch for actor and critic, that for the cost critic, metrics). The
        cost critic's has its own old_values and returns. Half of the KL penalty is charged to each side. Collective.
        """
        batch = _without(batch, costs.scores.isnan())
        charge, metrics = self._charge(batch, crew)
        rewarded = _judged(batch, crew, self._scores(batch), batch.columns.old_values, charge, -0.5)
        cost = _judged(batch, crew, costs.scores, costs.values, charge, 0.5)
        batch, cost_returns, estimated_metrics = self._estimate(
            batch, replace(rewarded, cost=cost), replace(self.options, multiplier=costs.multiplier))
        assert cost_returns is not None, "an estimator that knows of costs returns them"
        return (batch, batch.with_columns(old_values=costs.values, returns=cost_returns), metrics | estimated_metrics)

    def _scores(self, batch: Batch) -> Tensor:
        """`[rows]` fp64, less the punishment for length."""
        assert batch.scores is not None
        return batch.scores if self.overlong is None else batch.scores + self.overlong.punishment(batch)

    def _charge(self, batch: Batch, crew: Crew) -> tuple[Tensor | None, Metrics]:
        """`[tokens]` of KL penalty at home, None without one, and the metrics of all that is charged."""
        metrics: Metrics = {}
        if self.overlong is not None:
            metrics["reward/overlong_mean"] = self.overlong.punishment(batch).mean().item()
        if self.penalty is None:
            return None, metrics
        charge, more = self.penalty.of_tokens(batch, trained_tokens(batch, crew), crew)
        return charge, metrics | more

    def _estimate(self, batch: Batch, rewarded: Rewarded,
                  options: AdvantageOptions) -> tuple[Batch, Tensor | None, Metrics]:
        """The batch with what the estimator says, the returns of the cost critic, and metrics."""
        result = estimated(self.estimator, rewarded, options, whitened=self.whitened)
        columns = {"advantages": result.estimate.advantages, "loss_mask": rewarded.mask}
        if result.estimate.returns is not None:
            columns["returns"] = result.estimate.returns.to(rewarded.token_rewards.dtype)
        return (batch.with_columns(**columns), result.estimate.cost_returns,
                {"advantage/mean": result.mean, "advantage/std": result.variance**0.5})


def _without(batch: Batch, failed: Tensor) -> Batch:
    """The batch with the rows of `failed` `[rows]` not trained either."""
    assert batch.scores is not None
    return replace(batch, scores=torch.where(failed, torch.nan, batch.scores))


def _judged(batch: Batch, crew: Crew, scores: Tensor, values: Tensor | None, charge: Tensor | None,
            sign: float) -> Rewarded:
    """One judge's side of the batch: `scores` `[rows]` at the last trained tokens, and `sign` times `charge` `[tokens]`
    at each; the reward of a row is all of it. Collective where there is a charge.
    """
    like = batch.columns.rollout_log_probs
    assert like is not None
    mine, lengths = batch.home[crew.rank], batch.home_lengths(crew.rank)
    mask = trained_tokens(batch, crew).to(like.dtype)
    tokens = at_last_token(scores[list(mine)].nan_to_num(0.0).to(mask.dtype), mask, lengths)
    if charge is not None:
        tokens = tokens + sign * charge
        of_rows = torch.zeros_like(scores)
        of_rows[list(mine)] = row_sums(sign * charge.double(), lengths)
        scores = scores + crew.sum(of_rows)
    groups = torch.tensor(batch.groups, device=scores.device)
    return Rewarded(scores, groups, mine, lengths, mask, tokens, values,
                    total=lambda x: crew.sum(x.clone()))
