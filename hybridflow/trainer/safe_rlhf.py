"""Safe RLHF as a dataflow (Dai et al. 2023, arXiv 2310.12773): PPO with a cost beside the reward, and its bound.

generate -> reward, cost -> values of both -> combined advantages -> update both critics, update actor, move the
multiplier. The formulas are `algorithms.safe_rlhf`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridflow.algorithms.safe_rlhf import LagrangeMultiplier
from hybridflow.batch import Batch
from hybridflow.crew import Crew
from hybridflow.data.sft import SftExample
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.observe.phases import Phase
from hybridflow.packing import split_rows
from hybridflow.protocols import Protocol, given
from hybridflow.trainer.advantage import Costs
from hybridflow.trainer.board import Board, Metrics
from hybridflow.trainer.dataflow import Dataflow
from hybridflow.trainer.judging import score_moments
from hybridflow.trainer.roles import Lesson
from hybridflow.trainer.rollout_source import Experience

Examples = Iterator[Sequence[SftExample]]


@dataclass
class Bound:
    """What holds the cost.

    Attributes:
        multiplier: that of the next step.
        pretraining: pairs for a supervised loss in each optimizer step of the actor; None without.
    """

    multiplier: LagrangeMultiplier
    pretraining: Examples | None = None


class SafeRlhf(Dataflow):
    """The step. `bound` is given before the first one."""

    bound: Bound

    def learn_from(self, experience: Experience, crew: Crew, board: Board) -> Batch:
        """As `Dataflow.learn_from`, with costs. Rows leave for the judges of costs before anybody works."""
        roles = self.roles
        assert roles.costs is not None and roles.cost_critic is not None
        judgement = roles.costs.ask(experience.batch, experience.prompts)
        answers = roles.cost_critic.ask_tokens(experience.batch)
        batch = self.judge(experience, crew, board)
        with self.timer.phase(Phase.REWARD):
            judgement.work()
        with self.timer.phase(Phase.VALUES):
            answers.work()
            values = answers.result()
        with self.timer.phase(Phase.REWARD):
            scores, metrics = judgement.result(crew)
        board.said |= of_costs(metrics | score_moments(scores)) | {"cost/multiplier": self.bound.multiplier.value}
        board.trouble = "; ".join(filter(None, (board.trouble, roles.costs.last_fault))) or None
        costs = Costs(scores, values, self.bound.multiplier.value)
        batch, cost_batch, estimated = self.advantages.with_costs(batch, crew, costs)
        board.said |= estimated
        lessons = [roles.cost_critic.prepare(cost_batch, rows) for rows in self.update_rows(batch)]
        self.learn(batch, board)
        self.teach_critic(roles.cost_critic, "cost_critic", lessons, board)
        self._move_multiplier(scores)
        return batch

    def actor_lessons(self, batch: Batch, cuts: Sequence[range]) -> list[Lesson]:
        """Each step learns from pretraining pairs as well, where there are some."""
        if self.bound.pretraining is None:
            return super().actor_lessons(batch, cuts)
        lessons = []
        for rows in cuts:
            both = self._with_pretraining(batch, next(self.bound.pretraining))
            lessons.append(self.roles.actor.prepare(both, [*rows, *range(batch.num_rows, both.num_rows)]))
        return lessons

    def _with_pretraining(self, batch: Batch, examples: Sequence[SftExample]) -> Batch:
        """The batch and rows of `examples` behind its own, which have a weight of their own and no score."""
        actor, columns = self.roles.actor, batch.columns.present()
        like = next(iter(columns.values()))
        parts = split_rows(range(len(examples)), actor.blueprint.grid.layout.size)
        home = given(Protocol.DP, actor.blueprint.grid, parts, self.world.size)
        mine = [examples[row] for row in home[self.world.rank]]
        zeros = like.new_zeros(sum(len(example.response_ids) for example in mine))
        weight = zeros + 1.0 / sum(len(example.response_ids) for example in examples)
        pretraining = Batch(
            tuple(len(example.prompt_ids) for example in examples),
            tuple(len(example.response_ids) for example in examples), tuple(range(len(examples))), home,
            tuple(Sample(example.prompt_ids, example.response_ids) for example in mine),
            TokenColumns(**dict.fromkeys(columns, zeros)).with_columns(pretrain_weight=weight),
            torch.full((len(examples),), torch.nan, dtype=torch.float64, device=like.device))
        return Batch.joined([batch.with_columns(pretrain_weight=torch.zeros_like(like)), pretraining])

    def _move_multiplier(self, scores: Tensor) -> None:
        known = scores[~scores.isnan()]
        if known.numel():
            self.bound = replace(self.bound, multiplier=self.bound.multiplier.after(known.mean().item()))


def of_costs(metrics: Metrics) -> Metrics:
    """What was said of rewards, said of costs."""
    return {f"cost/{name.removeprefix('reward/')}": value for name, value in metrics.items()}
