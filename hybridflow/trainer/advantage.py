"""From scores to advantages on the rows at home, with moments over all ranks.

Owns what a score becomes: token rewards and GAE for PPO, group-relative advantages for GRPO. Rows whose score is NaN
(their reward failed) are not trained: they get `loss_mask` 0 and count in no mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import gae, grpo, mean_and_variance, moment_sums, whiten
from hybridflow.algorithms.kl import FixedKl, KlController, KlEstimator, kl, penalised_rewards
from hybridflow.algorithms.ragged import at_last_token, to_tokens
from hybridflow.batch import Batch
from hybridflow.crew import Crew

Metrics = dict[str, float]


def trained_tokens(batch: Batch, crew: Crew) -> Tensor:
    """`[response tokens of my home rows]`: 1.0 where the row has a score, 0.0 where its reward failed."""
    assert batch.scores is not None
    scores = batch.scores[list(batch.home[crew.rank])]
    return to_tokens((~scores.isnan()).to(torch.float32), batch.home_lengths(crew.rank))


@dataclass
class KlPenalty:
    """KL to the reference, subtracted from each token's reward; `controller` changes from step to step."""

    estimator: KlEstimator
    controller: KlController = field(default_factory=lambda: FixedKl(0.0))

    def charge(self, rewards: Tensor, batch: Batch, mask: Tensor, crew: Crew) -> tuple[Tensor, Metrics]:
        """Rewards less the penalty, and the KL per token; an adaptive coefficient moves by the KL per rollout."""
        policy = batch.columns.old_log_probs
        policy = batch.columns.rollout_log_probs if policy is None else policy
        reference = batch.columns.ref_log_probs
        assert policy is not None and reference is not None and batch.scores is not None
        coef = self.controller.coef
        penalised = penalised_rewards(rewards, policy, reference, coef=coef, estimator=self.estimator)
        divergence = kl(policy, reference, self.estimator).double() * mask
        total, tokens = crew.sum(torch.stack([divergence.sum(), mask.double().sum()])).tolist()
        if tokens:
            self.controller = self.controller.after(total / int((~batch.scores.isnan()).sum()))
        return penalised, {"policy/kl_reference": total / max(tokens, 1.0), "policy/kl_coef": coef}


@dataclass
class PpoAdvantages:
    """Score at the last token, less the KL penalty, through GAE."""

    gamma: float
    lam: float
    normalise: bool
    penalty: KlPenalty | None = None

    def __call__(self, batch: Batch, crew: Crew) -> tuple[Batch, Metrics]:
        """The batch with advantages and returns, and metrics. Needs scores and old_values. Collective."""
        assert batch.scores is not None and batch.columns.old_values is not None
        values, lengths, mask = batch.columns.old_values, batch.home_lengths(crew.rank), trained_tokens(batch, crew)
        scores = batch.scores[list(batch.home[crew.rank])].nan_to_num(0.0).to(values.dtype)
        rewards, metrics = at_last_token(scores, torch.ones_like(values), lengths), {}
        if self.penalty is not None:
            rewards, metrics = self.penalty.charge(rewards, batch, mask, crew)
        advantages, returns = gae(rewards, values, lengths, gamma=self.gamma, lam=self.lam)
        mean, variance = mean_and_variance(crew.sum(moment_sums(advantages, mask)))
        if self.normalise:
            advantages = whiten(advantages, mask, mean=mean, variance=variance)
        metrics |= {"advantage/mean": mean, "advantage/std": variance**0.5}
        return batch.with_columns(advantages=advantages, returns=returns, loss_mask=mask.to(values.dtype)), metrics


@dataclass
class GrpoAdvantages:
    """Each score relative to the other samples of its prompt, on every token of the row."""

    normalise_by_std: bool

    def __call__(self, batch: Batch, crew: Crew) -> tuple[Batch, Metrics]:
        """The batch with advantages, and metrics. Needs scores. Collective."""
        assert batch.scores is not None and batch.columns.rollout_log_probs is not None
        like, lengths = batch.columns.rollout_log_probs, batch.home_lengths(crew.rank)
        mask = trained_tokens(batch, crew)
        scored = ~batch.scores.isnan()
        groups = torch.tensor(batch.groups, device=batch.scores.device)
        row_advantages = torch.zeros_like(batch.scores)
        row_advantages[scored] = grpo(batch.scores[scored], groups[scored], normalise_by_std=self.normalise_by_std)
        advantages = to_tokens(row_advantages[list(batch.home[crew.rank])], lengths).to(like.dtype)
        mean, variance = mean_and_variance(crew.sum(moment_sums(advantages, mask)))
        return (batch.with_columns(advantages=advantages, loss_mask=mask.to(like.dtype)),
                {"advantage/mean": mean, "advantage/std": variance**0.5})


Advantages = PpoAdvantages | GrpoAdvantages
