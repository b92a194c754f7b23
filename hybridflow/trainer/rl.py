"""A reinforcement learner: the roles of a config and its dataflow, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybridflow.algorithms.registry import Need
from hybridflow.batch import Batch
from hybridflow.config.batch_math import BatchMath
from hybridflow.config.layouts import Role, roles
from hybridflow.config.recipe import needs_of
from hybridflow.config.words import Overlap
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.records import prompt_text
from hybridflow.exchange import share_json
from hybridflow.observe.phases import PhaseTimer
from hybridflow.observe.samples import RolloutSample
from hybridflow.observe.trace import Trace, TraceCategory, settle_device
from hybridflow.parallel.comm_hook import CommHook
from hybridflow.parallel.world import World
from hybridflow.response_text import answer_text
from hybridflow.trainer.batch_metrics import batch_metrics
from hybridflow.trainer.board import Metrics
from hybridflow.trainer.build import Builder, rl_updates
from hybridflow.trainer.dataflow import Dataflow, Roles, StepPlan
from hybridflow.trainer.evaluate import Evaluator, make_evaluator
from hybridflow.trainer.export import export_role
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.partial import PartialRollouts
from hybridflow.trainer.resampling import Resampling
from hybridflow.trainer.rollout import Sampler
from hybridflow.trainer.rollout_source import More, OneStepOff, OnPolicy, RolloutSource
from hybridflow.trainer.safe_rlhf import Bound, Examples, SafeRlhf


class RLTrainer:
    """PPO or GRPO on every rank of `world`. Making one is collective, and so is every method.

    Attributes:
        model: the actor's shape.
        prompts, batch: of the last step, None before the first.
        trouble: a sentence on what went wrong with its rewards, None if nothing did.
        trace: records one step when it is started.
    """

    def __init__(self, inputs: Inputs, world: World, comm_hook: CommHook | None = None,
                 pretraining: Examples | None = None) -> None:
        """
        Args:
            comm_hook: reduces gradients; None leaves it to the config.
            pretraining: endless batches of pairs for algorithm.safe.pretrain_coef, the same on every rank.
        Raises:
            ValueError: a model's folder does not hold what its config says.
        """
        self.inputs, self.world = inputs, world
        self.config, self.tokenizer, self.model = inputs.config, inputs.tokenizer, inputs.model
        settle = settle_device(world.device)
        self.trace = Trace(settle)
        self.timer = PhaseTimer(self.trace, settle)
        builder = Builder(inputs, world, self.trace, comm_hook)
        self.sampling = builder.sampling()
        self.roles = self._make_roles(builder)
        self.crew = builder.crew()
        kind = SafeRlhf if self.roles.costs is not None else Dataflow
        self.dataflow = kind(self.roles, self._source(builder), builder.advantages(), builder.actor_objective(),
                             builder.critic_objective(), self._plan(), self.timer, self.crew)
        if isinstance(self.dataflow, SafeRlhf):
            self.dataflow.bound = Bound(builder.multiplier(), pretraining)
        self.prompts: Sequence[TokenisedPrompt] = ()
        self.batch: Batch | None = None
        self.trouble: str | None = None

    def _make_roles(self, builder: Builder) -> Roles:
        updates, wanted = rl_updates(self.config, self.world.size), roles(self.config)
        actor = builder.actor(updates, self.config.generation.temperature)
        return Roles(
            actor,
            Sampler(actor, builder.hybrid(actor), self.config.train.seed, self.timer,
                    self.trace.lane(TraceCategory.RESHARD), builder.balance, keeps_weights=builder.generates_alone,
                    tells_versions=self.config.generation.overlap is not Overlap.NONE, turns=self.inputs.turns),
            builder.rewards(),
            critic=builder.critic(updates) if Role.CRITIC in wanted else None,
            reference=builder.reference() if Role.REFERENCE in wanted else None,
            costs=builder.costs() if Role.COST_CRITIC in wanted else None,
            cost_critic=builder.cost_critic(updates) if Role.COST_CRITIC in wanted else None,
        )

    def _plan(self) -> StepPlan:
        return StepPlan(self.config.train.global_batch_size, self.config.train.epochs_per_rollout)

    def _source(self, builder: Builder) -> RolloutSource:
        overlap, samples = self.config.generation.overlap, self.config.generation.samples_per_prompt
        if overlap is Overlap.PARTIAL:
            return PartialRollouts(self.roles.sampler, self.sampling, samples, self.config.data.prompts_per_step,
                                   self.config.generation.max_staleness)
        if overlap is Overlap.ONE_STEP_OFF:
            return OneStepOff(self.roles.sampler, self.sampling, samples)
        rounds = builder.resample_rounds
        greedy = Need.GREEDY_ANSWER in needs_of(self.config.algorithm)
        source = OnPolicy(self.roles.sampler, self.roles.rewards, self.sampling, samples,
                          {} if rounds else self.roles.scoring,
                          with_greedy=greedy)
        if not rounds:
            return source
        assert self.crew is not None, "it generates on its own ranks alone where it is overlapped"
        return Resampling(source, self.roles.rewards, self.crew, rounds)

    @property
    def steps_ahead(self) -> int:
        """For how many steps `start` wants prompts before the first `step`."""
        return self.dataflow.source.steps_ahead

    def start(self, prompts: Sequence[TokenisedPrompt]) -> None:
        """Begin to answer the prompts of the first step; the first `step` then brings those of the second."""
        self.dataflow.source.start(prompts)

    def step(self, prompts: Sequence[TokenisedPrompt], more: More | None = None) -> Metrics:
        """One step on `prompts`, or on those of the step before while these are answered; metrics by name. The prompts
        and the metrics are the same on every rank. `more` gives further prompts, where an algorithm replaces some.
        """
        experience, board = self.dataflow.step(prompts, more)
        self.prompts, self.batch = experience.prompts, experience.batch
        board.largest |= self.timer.take()
        if self.crew is not None:
            board.said |= batch_metrics(self.batch, self.crew, prompt_limit=self.config.data.max_prompt_length,
                                        response_limit=self.config.generation.max_new_tokens)
        metrics, self.trouble = board.shared(self.world), board.trouble
        seconds = metrics["time/step"]
        return metrics | {"perf/tokens_per_second": self.batch.num_tokens / seconds,
                          "perf/samples_per_second": self.batch.num_rows / seconds}

    def samples(self, count: int) -> list[RolloutSample]:
        """The first rollout of the first `count` prompts of the last step, in words and on every rank. Collective."""
        batch, each = self.batch, self.config.generation.samples_per_prompt
        assert batch is not None
        wanted = [prompt * each for prompt in range(min(count, len(self.prompts)))]
        mine = [(row, [answer_text(self.tokenizer, sample.response, self.inputs.ends), batch.scores[row].item()])
                for row, sample in zip(batch.home[self.world.rank], batch.samples, strict=True) if row in wanted]
        answers = dict(pair for pairs in share_json(self.world, mine) for pair in pairs)
        records = [self.prompts[batch.groups[row]].record for row in wanted]
        return [RolloutSample(prompt_text(record.prompt), answers[row][0], record.ground_truth, answers[row][1])
                for row, record in zip(wanted, records, strict=True)]

    def evaluator(self, prompts: Sequence[TokenisedPrompt]) -> Evaluator:
        """What asks the current actor `prompts`, as the evaluation block says."""
        return make_evaluator(self.inputs, self.roles.sampler, self.roles.rewards, prompts, self.sampling)

    def export(self, folder: Path) -> None:
        """Write the actor and its tokenizer in Hugging Face's form."""
        export_role(folder, self.roles.actor, self.tokenizer)

    def close(self) -> None:
        """End the workers of reward functions and tools."""
        self.roles.rewards.close()
        self.inputs.close_tools()
        if self.roles.costs is not None:
            self.roles.costs.close()

    def labels(self) -> dict[int, str]:
        """What each rank is. Example: "actor tp 0, cp 0, dp 1, pp 0; critic"; without roles it generates."""
        actor = self.roles.actor.blueprint.grid
        others = {"critic": self.roles.critic, "reference": self.roles.reference,
                  "cost critic": self.roles.cost_critic}
        told: dict[int, str] = {}
        for rank in range(self.world.size):
            found = [f"actor {actor.coord(rank).words()}"] if rank in actor.ranks else []
            found += [name for name, role in others.items() if role is not None and rank in role.blueprint.grid.ranks]
            told[rank] = "; ".join(found) or "generation"
        return told

    def batch_lines(self) -> list[str]:
        """How every batch number of a step comes about, and whether the updates of a step are alike."""
        math = BatchMath.of(self.config, self.world.size)
        return list(filter(None, (math.line(), math.uneven_line())))
