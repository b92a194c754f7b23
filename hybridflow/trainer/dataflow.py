"""One step of reinforcement learning, as one script that every rank runs (HybridFlow, arXiv 2409.19256, section 4).

generate -> reward -> reference log-probs, old log-probs, values -> advantages -> update critic, update actor. A call
on a role is work for that role's ranks; the batch moves itself to where a role needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.algorithms.losses import finish_metrics
from hybridflow.algorithms.objectives import ActorObjective, CriticObjective
from hybridflow.batch import Batch
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.engine.native import Output, Update
from hybridflow.generation.records import SamplingParams
from hybridflow.micro_batch import TokenColumns
from hybridflow.models.decoder import HeadOutput
from hybridflow.observe.phases import Phase, PhaseTimer
from hybridflow.parallel.collectives import all_reduce
from hybridflow.parallel.mesh import everyone
from hybridflow.parallel.world import World
from hybridflow.target_rows import TargetRows
from hybridflow.trainer.advantage import Advantages, Metrics
from hybridflow.trainer.roles import ScoringRole, TrainedRole, sum_over_world
from hybridflow.trainer.rollout import Sampler


class RewardSource(Protocol):
    """Where scores come from.

    Attributes:
        right_score: that of a right answer, None where no answer is simply right.
        last_fault: a sentence on the faults of the last call, None if there were none.
        last_extras: what was reported beside each score of the last call, for the rows at home here; () where nothing
            ever is.
    """

    right_score: float | None
    last_fault: str | None
    last_extras: Sequence[Mapping[str, Any]]

    def score(self, batch: Batch, prompts: Sequence[TokenisedPrompt]) -> tuple[Tensor, Metrics]:
        """Scores `[rows]` fp64, equal on every rank, NaN where the reward failed; and metrics. Collective.

        Row i answers `prompts[batch.groups[i]]`.
        """
        ...

    def close(self) -> None:
        """End whatever processes it has."""
        ...


@dataclass(frozen=True)
class Roles:
    """Who takes part. `critic` is None without one (GRPO), `reference` is None where no KL is charged."""

    actor: TrainedRole
    sampler: Sampler
    rewards: RewardSource
    critic: TrainedRole | None = None
    reference: ScoringRole | None = None


@dataclass(frozen=True)
class StepPlan:
    """The numbers of a step. `rows_per_update` rollouts make one optimizer step; `epochs` passes over a rollout."""

    samples_per_prompt: int
    rows_per_update: int
    epochs: int
    sampling: SamplingParams


class Dataflow:
    """The step of PPO and GRPO: they differ in `advantages` and in whether there is a critic."""

    def __init__(self, roles: Roles, advantages: Advantages, actor_loss: ActorObjective, critic_loss: CriticObjective,
                 plan: StepPlan, timer: PhaseTimer) -> None:
        self.roles, self.advantages, self.plan, self.timer = roles, advantages, plan, timer
        self.actor_loss, self.critic_loss = actor_loss, critic_loss

    @property
    def world(self) -> World:
        return self.roles.actor.world

    def step(self, prompts: Sequence[TokenisedPrompt]) -> tuple[Batch, Metrics]:
        """Learn from fresh answers to `prompts` (the same on every rank). Collective."""
        with self.timer.step():
            batch, metrics = self.generate(prompts)
            batch, scored = self.reward(batch, prompts)
            batch = self.score(batch)
            batch, estimated = self.advantages(batch, self.world)
            learned = self.learn(batch)
        return batch, metrics | scored | estimated | learned

    def generate(self, prompts: Sequence[TokenisedPrompt]) -> tuple[Batch, Metrics]:
        """Reshard the actor and let it answer."""
        rollout = self.roles.sampler.sample(prompts, self.plan.sampling, self.plan.samples_per_prompt)
        return rollout.batch, rollout.metrics() | self.roles.sampler.reshard_metrics()

    def reward(self, batch: Batch, prompts: Sequence[TokenisedPrompt]) -> tuple[Batch, Metrics]:
        """Score every row."""
        with self.timer.phase(Phase.REWARD):
            scores, metrics = self.roles.rewards.score(batch, prompts)
        return replace(batch, scores=scores), metrics | score_moments(scores)

    def score(self, batch: Batch) -> Batch:
        """Reference log-probs, old log-probs and values, each where the algorithm needs it."""
        roles = self.roles
        if roles.reference is not None:
            with self.timer.phase(Phase.REFERENCE):
                batch = batch.with_columns(ref_log_probs=roles.reference.answer_tokens(batch))
        if len(self.update_rows(batch)) > 1:  # else old is the policy itself: ratio exactly 1, and no pass needed
            with self.timer.phase(Phase.LOG_PROBS):
                batch = batch.with_columns(old_log_probs=roles.actor.answer_tokens(batch))
        if roles.critic is not None:
            with self.timer.phase(Phase.VALUES):
                batch = batch.with_columns(old_values=roles.critic.answer_tokens(batch))
        return batch

    def learn(self, batch: Batch) -> Metrics:
        """Every optimizer step of the critic, then of the actor, on this batch. The last one sends the new weights on
        to the generator.
        """
        critic_updates = []
        if self.roles.critic is not None:
            with self.timer.phase(Phase.UPDATE_CRITIC), self.roles.critic.engine.on_device():
                critic_updates = [self.roles.critic.update(batch, rows, self._critic_loss)
                                  for rows in self.update_rows(batch)]
        with self.timer.phase(Phase.UPDATE_ACTOR), self.roles.actor.engine.on_device():
            actor_updates, gap = self._learn_actor(batch)
        return (policy_metrics(actor_updates) | critic_metrics(critic_updates) | self._train_metrics()
                | {"policy/log_prob_gap_max": gap})

    def _learn_actor(self, batch: Batch) -> tuple[list[Update], float]:
        """The updates, and the largest gap between the log-probs of generator and actor before the first of them."""
        updates, losses, cuts = [], [], self.update_rows(batch)
        for number, rows in enumerate(cuts, start=1):
            losses.append(_ActorLoss(self.actor_loss, self.world.device))
            reshard = self.roles.sampler if number == len(cuts) else None
            updates.append(self.roles.actor.update(batch, rows, losses[-1], reshard))
        return updates, all_reduce(losses[0].largest_gap, everyone(self.world), dist.ReduceOp.MAX).item()

    def _train_metrics(self) -> Metrics:
        """Skipped steps and reduced bytes since the start, over the roles that learn; and their loss scales (fp16)."""
        engines = {"policy": self.roles.actor.trainer}
        if self.roles.critic is not None:
            engines["critic"] = self.roles.critic.trainer
        reduced = sum(engine.grads.reduced_bytes for engine in engines.values())
        everywhere = sum_over_world(torch.tensor(reduced, dtype=torch.int64, device=self.world.device), self.world)
        scales = {f"{name}/loss_scale": engine.optimizer.scale for name, engine in engines.items()
                  if engine.optimizer.loss_scale is not None}
        return scales | {"train/reduced_bytes": float(everywhere),
                         "train/skipped_steps": float(sum(e.optimizer.num_skipped for e in engines.values()))}

    def update_rows(self, batch: Batch) -> list[range]:
        """The rows of each optimizer step; the last of an epoch may be short."""
        size = self.plan.rows_per_update
        one_epoch = [range(start, min(start + size, batch.num_rows)) for start in range(0, batch.num_rows, size)]
        return one_epoch * self.plan.epochs

    def _critic_loss(self, output: Output, columns: TokenColumns, rows: TargetRows) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(output, Tensor)
        return self.critic_loss(output, columns)


class _ActorLoss:
    """The actor's objective, which also watches how far training log-probs are from the generator's."""

    def __init__(self, objective: ActorObjective, device: torch.device) -> None:
        self.objective = objective
        self.largest_gap = torch.zeros((), dtype=torch.float64, device=device)

    def __call__(self, output: Output, columns: TokenColumns, rows: TargetRows) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(output, HeadOutput)
        if columns.rollout_log_probs is not None and columns.rollout_log_probs.numel():
            gap = (output.log_probs.detach() - columns.rollout_log_probs).abs().max()
            self.largest_gap = torch.maximum(self.largest_gap, gap.double())
        return self.objective(output.log_probs, output.entropy, columns, rows)


def score_moments(scores: Tensor) -> Metrics:
    """Mean, deviation and range of the scores that are numbers."""
    known = scores[~scores.isnan()]
    if not known.numel():
        return {}
    return {"reward/mean": known.mean().item(), "reward/std": known.std(correction=0).item(),
            "reward/min": known.min().item(), "reward/max": known.max().item()}


POLICY_NAMES = {"loss": "policy/loss", "policy_loss": "policy/surrogate_loss", "clip_fraction": "policy/clip_fraction",
                "approx_kl": "policy/approx_kl", "entropy": "policy/entropy", "kl": "policy/kl_reference",
                "ratio": "policy/ratio_mean", "dual_clip_fraction": "policy/dual_clip_fraction",
                "kl_loss": "policy/kl_loss", "rollout_gap": "policy/log_prob_gap_mean"}
CRITIC_NAMES = {"value_loss": "critic/loss", "value_clip_fraction": "critic/clip_fraction",
                "value": "critic/value_mean", "return": "critic/return_mean",
                "value_error": "critic/value_error", "explained_variance": "critic/explained_variance"}
OF_FIRST_UPDATE = ("policy/log_prob_gap_mean", "critic/value_mean", "critic/explained_variance")


def policy_metrics(updates: Sequence[Update]) -> Metrics:
    """The actor's metrics of a step."""
    return _mean_metrics(updates, POLICY_NAMES, "policy")


def critic_metrics(updates: Sequence[Update]) -> Metrics:
    """The critic's metrics of a step, none without a critic."""
    return _mean_metrics(updates, CRITIC_NAMES, "critic") if updates else {}


def _mean_metrics(updates: Sequence[Update], names: dict[str, str], role: str) -> Metrics:
    """Means over the updates of a step; what must be seen before any update is taken from the first."""
    finished = [finish_metrics(update.sums) for update in updates]
    metrics = {}
    for name, shown in names.items():
        told = [one[name] for one in (finished[:1] if shown in OF_FIRST_UPDATE else finished) if name in one]
        if told:
            metrics[shown] = sum(told) / len(told)
    steps = [update.step for update in updates]
    taken = [step for step in steps if not step.skipped] or steps
    metrics[f"{role}/grad_norm"] = sum(step.grad_norm for step in taken) / len(taken)
    metrics[f"{role}/lr"] = steps[-1].lr
    return metrics
