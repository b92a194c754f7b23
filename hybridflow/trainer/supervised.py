"""A supervised learner: the actor alone, on pairs of prompt and response."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybridflow.algorithms.losses import finish_metrics, supervised_loss
from hybridflow.batch import Rows
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.sft import SftExample
from hybridflow.engine.native import Output
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.models.decoder import HeadOutput
from hybridflow.observe.phases import Phase, PhaseTimer
from hybridflow.observe.trace import Trace, TraceCategory, settle_device
from hybridflow.parallel.world import World
from hybridflow.target_rows import TargetRows
from hybridflow.trainer.build import Builder
from hybridflow.trainer.dataflow import RewardSource
from hybridflow.trainer.evaluate import Evaluator
from hybridflow.trainer.export import export_actor
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.roles import response_counts
from hybridflow.trainer.rollout import Sampler


class SupervisedTrainer:
    """Minimises the negative log-prob of the responses. Making one is collective, and so is every method."""

    def __init__(self, inputs: Inputs, world: World) -> None:
        self.world = world
        self.config, self.tokenizer, self.model = inputs.config, inputs.tokenizer, inputs.model
        settle = settle_device(world.device)
        self.trace = Trace(settle)
        self.timer = PhaseTimer(self.trace, settle)
        self.builder = Builder(inputs, world, self.trace)
        self.actor = self.builder.actor(self.config.sft.steps, temperature=1.0)
        self.rewards: RewardSource | None = None

    def step(self, examples: Sequence[SftExample]) -> dict[str, float]:
        """One optimizer step on `examples`, the same on every rank."""
        with self.timer.step(), self.timer.phase(Phase.UPDATE_ACTOR):
            samples = [Sample(example.prompt_ids, example.response_ids) for example in examples]
            share = self.actor.share(range(len(samples)), [sample.length for sample in samples], self.actor.training)
            mine = Rows(tuple(samples[row] for row in share.rows_of[self.world.rank]), TokenColumns())
            counts = response_counts([len(sample.response) for sample in samples])
            update = self.actor.learn(mine, share.sizes, counts, _loss)
        metrics = self.timer.take()
        tokens, optimizer = sum(sample.length for sample in samples), self.actor.trainer.optimizer
        scale = {} if optimizer.loss_scale is None else {"sft/loss_scale": optimizer.scale}
        return metrics | scale | {"sft/loss": finish_metrics(update.sums)["supervised_loss"],
                          "sft/grad_norm": update.step.grad_norm, "sft/lr": update.step.lr,
                          "train/skipped_steps": float(optimizer.num_skipped),
                          "perf/tokens_per_second": tokens / metrics["time/step"]}

    def evaluator(self, prompts: Sequence[TokenisedPrompt]) -> Evaluator:
        """What asks the current actor `prompts`, greedily, on the generation layout."""
        sampler = Sampler(self.actor, self.builder.hybrid(self.actor), self.config.train.seed, self.timer,
                          self.trace.lane(TraceCategory.RESHARD), self.builder.balance)
        self.rewards = self.builder.rewards()
        return Evaluator(sampler, self.rewards, prompts, self.builder.sampling())

    def close(self) -> None:
        """End the workers of the reward function, if any."""
        if self.rewards is not None:
            self.rewards.close()

    def export(self, folder: Path) -> None:
        """Write the model and its tokenizer in Hugging Face's form."""
        export_actor(folder, self.actor.trainer, self.tokenizer)


def _loss(output: Output, columns: TokenColumns, rows: TargetRows) -> tuple:
    assert isinstance(output, HeadOutput)
    return supervised_loss(output.log_probs, columns)
