"""One step of reinforcement learning, as one script that every rank runs (HybridFlow, arXiv 2409.19256, section 4).

generate -> reward -> reference log-probs, old log-probs, values -> advantages -> update critic, update actor. A call
on a role is work for that role's ranks; the batch moves itself to where a role needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.algorithms.losses import finish_metrics
from hybridflow.algorithms.objectives import ActorObjective, CriticObjective
from hybridflow.batch import Batch
from hybridflow.crew import Crew
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.engine.blueprint import Elsewhere
from hybridflow.engine.native import Output, Update
from hybridflow.micro_batch import TokenColumns
from hybridflow.models.decoder import HeadOutput
from hybridflow.observe.phases import Phase, PhaseTimer
from hybridflow.parallel.collectives import all_reduce
from hybridflow.parallel.world import World
from hybridflow.target_rows import TargetRows
from hybridflow.trainer.advantage import Advantages
from hybridflow.trainer.board import Board, Metrics
from hybridflow.trainer.judging import RewardSource, judged, score_moments
from hybridflow.trainer.roles import Lesson, ScoringRole, TrainedRole
from hybridflow.trainer.rollout import Sampler
from hybridflow.trainer.rollout_source import Experience, More, RolloutSource
from hybridflow.trainer.staleness import staleness


@dataclass(frozen=True)
class Roles:
    """Who takes part. `critic` is None without one (GRPO), `reference` is None where no KL is charged, `costs` and
    `cost_critic` where no cost is bounded.
    """

    actor: TrainedRole
    sampler: Sampler
    rewards: RewardSource
    critic: TrainedRole | None = None
    reference: ScoringRole | None = None
    costs: RewardSource | None = None
    cost_critic: TrainedRole | None = None

    @property
    def scoring(self) -> dict[str, tuple[Phase, ScoringRole]]:
        """By column who says something of each response token, whatever is learned from it."""
        found: dict[str, tuple[Phase, ScoringRole]] = {}
        if self.reference is not None:
            found["ref_log_probs"] = Phase.REFERENCE, self.reference
        if self.critic is not None:
            found["old_values"] = Phase.VALUES, self.critic
        return found


@dataclass(frozen=True)
class StepPlan:
    """The numbers of a step. `rows_per_update` rollouts make one optimizer step; `epochs` passes over a rollout."""

    rows_per_update: int
    epochs: int


class Dataflow:
    """The step of PPO and GRPO: they differ in `advantages` and in whether there is a critic.

    Which ranks a role has is not to be seen here. Rows leave for every role before any role works, and lessons for all
    updates before the first one: roles with the same ranks then take turns, others work at the same time.
    """

    def __init__(self, roles: Roles, source: RolloutSource, advantages: Advantages, actor_loss: ActorObjective,
                 critic_loss: CriticObjective, plan: StepPlan, timer: PhaseTimer, crew: Crew | None) -> None:
        """`crew`: the ranks that work on a batch once it is generated; None on the others."""
        self.roles, self.source, self.advantages, self.plan, self.timer = roles, source, advantages, plan, timer
        self.actor_loss, self.critic_loss, self.crew = actor_loss, critic_loss, crew

    @property
    def world(self) -> World:
        return self.roles.actor.world

    def step(self, prompts: Sequence[TokenisedPrompt], more: More | None = None) -> tuple[Experience, Board]:
        """Learn from answers to `prompts` (the same on every rank), or to earlier ones while these are generated.
        `more` gives further prompts.
        """
        board = Board()
        with self.timer.step():
            experience = self.source.next(prompts, board, more)
            if self.crew is not None:
                experience = replace(experience, batch=self.learn_from(experience, self.crew, board))
            else:  # others learn meanwhile
                self.roles.actor.trainer.num_updates += len(self.update_rows(experience.batch))
            self.world.outbox.finish()
            self.source.rest()
        return experience, board

    def learn_from(self, experience: Experience, crew: Crew, board: Board) -> Batch:
        """Judge a batch, estimate advantages, update the critic and the actor. Collective over the crew."""
        batch = self.judge(experience, crew, board)
        batch, estimated = self.advantages(batch, crew, self.baselines(experience, crew, board))
        board.said |= estimated | staleness(batch, self.roles.actor.trainer, crew)
        self.learn(batch, board)
        return batch

    def baselines(self, experience: Experience, crew: Crew, board: Board) -> Tensor | None:
        """`[rows]` fp64: the reward of the greedy answer to each row's prompt; None where there are none."""
        if experience.greedy is None:
            return None
        with self.timer.phase(Phase.REWARD):
            scores, _ = judged(self.roles.rewards, experience.greedy, experience.prompts, crew)
        board.said |= {f"reward/greedy_{name.removeprefix('reward/')}": value
                       for name, value in score_moments(scores).items() if name.endswith("mean")}
        board.trouble = board.trouble or self.roles.rewards.last_fault
        return scores[list(experience.batch.groups)]

    def judge(self, experience: Experience, crew: Crew, board: Board) -> Batch:
        """Scores, and reference log-probs, old log-probs and values, each where the algorithm needs it and nobody has
        seen to it already.
        """
        roles, batch, streamed = self.roles, experience.batch, experience.streamed
        scores, early = None, experience.early
        if batch.scores is None:
            scores = roles.rewards.ask(batch, experience.prompts, early, None if early is None else crew)
        once = len(self.update_rows(batch)) == 1  # then old is the policy itself: ratio exactly 1, and no pass needed
        wanted = dict(roles.scoring)
        if not once:
            wanted["old_log_probs"] = Phase.LOG_PROBS, roles.actor
        asked = {column: (phase, streamed[column] if column in streamed
                          else role.ask_tokens(batch, keep_forward=once and role is roles.critic))
                 for column, (phase, role) in wanted.items()}
        if scores is not None:
            with self.timer.phase(Phase.REWARD):
                scores.work()
        for phase, answers in asked.values():
            with self.timer.phase(phase):
                answers.work()
        batch = batch.with_columns(**{name: answers.result() for name, (_, answers) in asked.items()})
        if scores is None:
            return batch
        with self.timer.phase(Phase.REWARD):
            row_scores, metrics = scores.result(crew)
        board.said |= metrics | score_moments(row_scores)
        board.trouble = roles.rewards.last_fault
        return replace(batch, scores=row_scores)

    def learn(self, batch: Batch, board: Board) -> None:
        """Every optimizer step of the critic, then of the actor, on this batch. The last one sends the new weights on
        to the generator, where it has the actor's ranks.
        """
        actor, critic, cuts = self.roles.actor, self.roles.critic, self.update_rows(batch)
        for_critic = [] if critic is None else [critic.prepare(batch, rows) for rows in cuts]
        for_actor = self.actor_lessons(batch, cuts)
        if critic is not None:
            self.teach_critic(critic, "critic", for_critic, board)
        with self.timer.phase(Phase.UPDATE_ACTOR), actor.turn():
            metrics = self._learn_actor(for_actor)
        self._tell(board, "policy", actor, metrics)

    def teach_critic(self, critic: TrainedRole, name: str, lessons: Sequence[Lesson], board: Board) -> None:
        """Every optimizer step of a critic, told of under `name`."""
        with self.timer.phase(Phase.UPDATE_CRITIC), critic.turn():
            updates = [critic.take(lesson, self._critic_loss) for lesson in lessons]
        metrics = critic_metrics(present(updates))
        self._tell(board, name, critic, {f"{name}/{key.partition('/')[2]}": value for key, value in metrics.items()})

    def actor_lessons(self, batch: Batch, cuts: Sequence[range]) -> list[Lesson]:
        """What the actor learns from, on its way to it: these rows in one optimizer step each."""
        return [self.roles.actor.prepare(batch, rows) for rows in cuts]

    def _learn_actor(self, lessons: Sequence[Lesson]) -> Metrics:
        """The metrics, with the largest gap between the log-probs of generator and actor before the first update."""
        roles, updates, losses = self.roles, [], []
        for number, lesson in enumerate(lessons, start=1):
            losses.append(_ActorLoss(self.actor_loss, self.world.device))
            ends = number == len(lessons) and roles.sampler.hybrid.ends_updates
            updates.append(roles.actor.take(lesson, losses[-1], roles.sampler if ends else None))
        if roles.actor.engine is None:
            return {}
        gap = all_reduce(losses[0].largest_gap, roles.actor.engine.mesh.members, dist.ReduceOp.MAX).item()
        return policy_metrics(present(updates)) | {"policy/log_prob_gap_max": gap}

    def _tell(self, board: Board, name: str, role: TrainedRole, metrics: Metrics) -> None:
        """What a role has learned; skipped steps and reduced bytes since the start, and its loss scale (fp16)."""
        engine = role.trainer
        if isinstance(engine, Elsewhere):
            return
        board.said |= metrics
        if engine.optimizer.loss_scale is not None:
            board.said[f"{name}/loss_scale"] = engine.optimizer.scale
        speaks = self.world.rank == role.blueprint.speaker
        for total, part in (("train/reduced_bytes", engine.grads.reduced_bytes),
                            ("train/skipped_steps", engine.optimizer.num_skipped if speaks else 0)):
            board.summed[total] = board.summed.get(total, 0.0) + float(part)

    def update_rows(self, batch: Batch) -> list[range]:
        """The rows of each optimizer step; the last of an epoch may be short."""
        size = self.plan.rows_per_update
        one_epoch = [range(start, min(start + size, batch.num_rows)) for start in range(0, batch.num_rows, size)]
        return one_epoch * self.plan.epochs

    def _critic_loss(self, output: Output, columns: TokenColumns, rows: TargetRows) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(output, Tensor)
        return self.critic_loss(output, columns)


def present(updates: Sequence[Update | None]) -> list[Update]:
    """The updates that this rank took part in."""
    return [update for update in updates if update is not None]


class _ActorLoss:
    """The actor's objective, which also watches how far training log-probs are from the generator's."""

    def __init__(self, objective: ActorObjective, device: torch.device) -> None:
        self.objective = objective
        self.largest_gap = torch.zeros((), dtype=torch.float64, device=device)

    def __call__(self, output: Output, columns: TokenColumns, rows: TargetRows) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(output, HeadOutput)
        if columns.rollout_log_probs is not None and columns.rollout_log_probs.numel():
            gap = (output.log_probs.detach() - columns.rollout_log_probs).abs()
            if columns.loss_mask is not None:  # pretraining pairs, and what tools said: tokens that nobody sampled
                gap = torch.where(columns.loss_mask != 0, gap, 0.0)
            gap = gap.max()
            self.largest_gap = torch.maximum(self.largest_gap, gap.double())
        return self.objective(output.log_probs, output.entropy, columns, rows)


POLICY_NAMES = {"loss": "policy/loss", "policy_loss": "policy/surrogate_loss", "clip_fraction": "policy/clip_fraction",
                "approx_kl": "policy/approx_kl", "entropy": "policy/entropy", "kl": "policy/kl_reference",
                "ratio": "policy/ratio_mean", "dual_clip_fraction": "policy/dual_clip_fraction",
                "kl_loss": "policy/kl_loss", "ptx_loss": "policy/pretrain_loss",
                "rollout_gap": "policy/log_prob_gap_mean",
                "correction_weight": "policy/correction_weight", "correction_ess": "policy/correction_ess",
                "correction_fraction": "policy/correction_fraction"}
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
