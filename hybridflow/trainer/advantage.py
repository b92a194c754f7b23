"""From scores to advantages on the rows at home, with moments over all ranks.

Owns what a score becomes before an estimator sees it: punishment for length, KL penalty, one reward a row and one a
token. Which estimator that is, it is told. Rows whose score is NaN (their reward failed) are not trained: they get
`loss_mask` 0 and count in no mean.
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
from hybridflow.parallel.world import World
from hybridflow.trainer.roles import sum_over_world

Metrics = dict[str, float]


def trained_tokens(batch: Batch, world: World) -> Tensor:
    """`[response tokens of my home rows]` fp32: 1.0 where the row has a score, 0.0 where its reward failed or the batch
    has a loss_mask that says so.
    """
    assert batch.scores is not None
    scores = batch.scores[list(batch.home[world.rank])]
    scored = to_tokens((~scores.isnan()).to(torch.float32), batch.home_lengths(world))
    mask = batch.columns.loss_mask
    return scored if mask is None else torch.where(mask != 0, scored, 0.0)


@dataclass
class KlPenalty:
    """KL to the reference, subtracted from each token's reward (Ziegler et al. 2019, arXiv:1909.08593, eq. 2, with k1).
    `controller` changes from step to step.
    """

    estimator: KlEstimator
    controller: KlController = field(default_factory=lambda: FixedKl(0.0))

    def of_tokens(self, batch: Batch, mask: Tensor, world: World) -> tuple[Tensor, Metrics]:
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
        total, tokens = sum_over_world(sums, world).tolist()
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

    def __call__(self, batch: Batch, world: World, baselines: Tensor | None = None) -> tuple[Batch, Metrics]:
        """The batch with advantages, returns where there is a critic, and loss_mask; and metrics. Collective.

        Args:
            batch: with scores, rollout_log_probs, and what the estimator and the penalty need.
            baselines: `[rows]` fp64 on every rank, the score of the greedy answer to each row's prompt, where the
                estimator needs it. A row whose baseline is NaN is not trained.
        """
        assert batch.scores is not None
        if baselines is not None:
            batch = replace(batch, scores=torch.where(baselines.isnan(), torch.nan, batch.scores))
        rewarded, metrics = self._rewarded(batch, world)
        result = estimated(self.estimator, replace(rewarded, baselines=baselines), self.options,
                           whitened=self.whitened)
        columns = {"advantages": result.estimate.advantages, "loss_mask": rewarded.mask}
        if result.estimate.returns is not None:
            columns["returns"] = result.estimate.returns.to(rewarded.token_rewards.dtype)
        return (batch.with_columns(**columns),
                metrics | {"advantage/mean": result.mean, "advantage/std": result.variance**0.5})

    def _rewarded(self, batch: Batch, world: World) -> tuple[Rewarded, Metrics]:
        """The rewards as the estimator is given them."""
        assert batch.scores is not None and batch.columns.rollout_log_probs is not None
        mine, lengths = batch.home[world.rank], batch.home_lengths(world)
        mask = trained_tokens(batch, world).to(batch.columns.rollout_log_probs.dtype)
        metrics: Metrics = {}
        scores = batch.scores
        if self.overlong is not None:
            punishment = self.overlong.punishment(batch)
            scores, metrics = scores + punishment, {"reward/overlong_mean": punishment.mean().item()}
        tokens = at_last_token(scores[list(mine)].nan_to_num(0.0).to(mask.dtype), mask, lengths)
        if self.penalty is not None:
            charged, more = self.penalty.of_tokens(batch, mask, world)
            tokens, metrics = tokens - charged, metrics | more
            of_rows = torch.zeros_like(scores)
            of_rows[list(mine)] = row_sums(charged.double(), lengths)
            scores = scores - sum_over_world(of_rows, world)
        groups = torch.tensor(batch.groups, device=scores.device)
        return Rewarded(scores, groups, mine, lengths, mask, tokens, batch.columns.old_values,
                        total=lambda x: sum_over_world(x.clone(), world)), metrics
