"""What supervised and preference training share: one model that learns from given answers, and how it is watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridflow.data.loader import TokenisedPrompt
from hybridflow.engine.native import Update
from hybridflow.observe.phases import PhaseTimer
from hybridflow.observe.trace import Trace, TraceCategory, settle_device
from hybridflow.parallel.world import World
from hybridflow.trainer.build import Builder
from hybridflow.trainer.evaluate import Evaluator, answer_lines, make_evaluator
from hybridflow.trainer.export import export_role
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.judging import RewardSource
from hybridflow.trainer.roles import TrainedRole
from hybridflow.trainer.rollout import Sampler

Metrics = dict[str, float]
Learner = Callable[[Builder], TrainedRole]


class OfflineTrainer:
    """The base of trainers that are given answers. Making one is collective, and so is every method.

    Attributes:
        area: the first part of the names of its metrics.
        actor: what learns.
    """

    area: str

    def __init__(self, inputs: Inputs, world: World, make_actor: Learner) -> None:
        self.world = world
        self.config, self.tokenizer, self.model = inputs.config, inputs.tokenizer, inputs.model
        settle = settle_device(world.device)
        self.trace = Trace(settle)
        self.timer = PhaseTimer(self.trace, settle)
        self.builder = Builder(inputs, world, self.trace)
        self.actor = make_actor(self.builder)
        self.rewards: RewardSource | None = None
        self.asks: Evaluator | None = None

    def update_metrics(self, update: Update, num_tokens: int) -> Metrics:
        """What every optimizer step tells, and the times of the step, which has ended. `num_tokens`: of its rows."""
        metrics, optimizer, area = self.timer.take(), self.actor.trainer.optimizer, self.area
        scale = {} if optimizer.loss_scale is None else {f"{area}/loss_scale": optimizer.scale}
        return metrics | scale | {f"{area}/grad_norm": update.step.grad_norm, f"{area}/lr": update.step.lr,
                                  "train/skipped_steps": float(optimizer.num_skipped),
                                  "perf/tokens_per_second": num_tokens / metrics["time/step"]}

    def evaluator(self, prompts: Sequence[TokenisedPrompt]) -> Callable[[], Metrics]:
        """What evaluates the current actor: here what asks it `prompts`, as the evaluation block says, on the
        generation layout.
        """
        sampler = Sampler(self.actor, self.builder.hybrid(self.actor), self.config.train.seed, self.timer,
                          self.trace.lane(TraceCategory.RESHARD), self.builder.balance)
        self.rewards = self.builder.rewards()
        self.asks = make_evaluator(self.builder.inputs, sampler, self.rewards, prompts, self.builder.sampling())
        return self.asks

    def answers(self) -> list[dict[str, Any]]:
        """Lines on the answers of the last evaluation, where they are kept."""
        return [] if self.asks is None else answer_lines(self.asks.answers)

    def close(self) -> None:
        """End the workers of the reward function, if any."""
        if self.rewards is not None:
            self.rewards.close()

    def export(self, folder: Path) -> None:
        """Write the model and its tokenizer in Hugging Face's form."""
        export_role(folder, self.actor, self.tokenizer)
