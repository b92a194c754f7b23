"""A reinforcement learner: the roles of a config and its dataflow, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybridflow.batch import Batch
from hybridflow.config.batch_math import BatchMath
from hybridflow.config.layouts import Role, roles
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.records import prompt_text
from hybridflow.exchange import share_json
from hybridflow.observe.phases import PhaseTimer
from hybridflow.observe.samples import RolloutSample
from hybridflow.observe.trace import Trace, TraceCategory, settle_device
from hybridflow.parallel.comm_hook import CommHook
from hybridflow.parallel.world import World
from hybridflow.response_text import answer_text
from hybridflow.trainer.build import Builder, rl_updates
from hybridflow.trainer.dataflow import Dataflow, Metrics, Roles, StepPlan
from hybridflow.trainer.evaluate import Evaluator
from hybridflow.trainer.export import export_actor
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.rollout import Sampler


class RLTrainer:
    """PPO or GRPO on every rank of `world`. Making one is collective, and so is every method.

    Attributes:
        model: the actor's shape.
        prompts, batch: of the last step, None before the first.
        trace: records one step when it is started.
    """

    def __init__(self, inputs: Inputs, world: World, comm_hook: CommHook | None = None) -> None:
        """`comm_hook` reduces gradients; None leaves it to the config. Raises ValueError where a model's folder does
        not hold what its config says.
        """
        self.inputs, self.world = inputs, world
        self.config, self.tokenizer, self.model = inputs.config, inputs.tokenizer, inputs.model
        settle = settle_device(world.device)
        self.trace = Trace(settle)
        self.timer = PhaseTimer(self.trace, settle)
        builder = Builder(inputs, world, self.trace, comm_hook)
        self.sampling = builder.sampling()
        self.roles = self._make_roles(builder)
        self.dataflow = Dataflow(self.roles, builder.advantages(), builder.actor_objective(),
                                 builder.critic_objective(), self._plan(), self.timer)
        self.prompts: Sequence[TokenisedPrompt] = ()
        self.batch: Batch | None = None

    def _make_roles(self, builder: Builder) -> Roles:
        updates, wanted = rl_updates(self.config, self.world.size), roles(self.config)
        actor = builder.actor(updates, self.config.generation.temperature)
        return Roles(
            actor,
            Sampler(actor, builder.hybrid(actor), self.config.train.seed, self.timer,
                    self.trace.lane(TraceCategory.RESHARD), builder.balance, keeps_weights=builder.generates_alone),
            builder.rewards(),
            critic=builder.critic(updates) if Role.CRITIC in wanted else None,
            reference=builder.reference() if Role.REFERENCE in wanted else None,
        )

    def _plan(self) -> StepPlan:
        return StepPlan(self.config.generation.samples_per_prompt, self.config.train.global_batch_size,
                        self.config.train.epochs_per_rollout, self.sampling)

    def step(self, prompts: Sequence[TokenisedPrompt]) -> Metrics:
        """One step on `prompts`, the same on every rank; metrics by name, the same on every rank but for times."""
        self.prompts = prompts
        self.batch, board = self.dataflow.step(prompts)
        board.largest |= self.timer.take()
        metrics = board.shared(self.world)
        seconds = metrics["time/step"]
        return metrics | {"perf/tokens_per_second": self.batch.num_tokens / seconds,
                          "perf/samples_per_second": self.batch.num_rows / seconds}

    def samples(self, count: int) -> list[RolloutSample]:
        """The first rollout of the first `count` prompts of the last step, in words and on every rank. Collective."""
        batch, each = self.batch, self.config.generation.samples_per_prompt
        assert batch is not None and batch.scores is not None
        wanted = [prompt * each for prompt in range(min(count, len(self.prompts)))]
        mine = [(row, answer_text(self.tokenizer, sample.response, self.inputs.ends))
                for row, sample in zip(batch.home[self.world.rank], batch.samples, strict=True) if row in wanted]
        answers = dict(pair for pairs in share_json(self.world, mine) for pair in pairs)
        records = [self.prompts[batch.groups[row]].record for row in wanted]
        return [RolloutSample(prompt_text(record.prompt), answers[row], record.ground_truth, batch.scores[row].item())
                for row, record in zip(wanted, records, strict=True)]

    def evaluator(self, prompts: Sequence[TokenisedPrompt]) -> Evaluator:
        """What asks the current actor `prompts`, greedily."""
        return Evaluator(self.roles.sampler, self.roles.rewards, prompts, self.sampling)

    def export(self, folder: Path) -> None:
        """Write the actor and its tokenizer in Hugging Face's form."""
        export_actor(folder, self.roles.actor.trainer, self.tokenizer)

    def close(self) -> None:
        """End the workers of the reward function."""
        self.roles.rewards.close()

    def batch_line(self) -> str:
        """How every batch number of a step comes about."""
        return BatchMath.of(self.config, self.world.size).line()
