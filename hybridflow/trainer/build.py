"""From a config to what runs: models, meshes, engines, roles, rewards and data.

The only module where config words become enums, tensors' dtypes and objects of the other packages. It trains nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from hybridflow.algorithms.advantages import AdvantageOptions
from hybridflow.algorithms.correction import Bounding, Correction, RatioOf
from hybridflow.algorithms.kl import AdaptiveKl, FixedKl, KlEstimator
from hybridflow.algorithms.losses import Clip
from hybridflow.algorithms.objectives import ActorObjective, CriticObjective
from hybridflow.algorithms.reduction import LossReduction
from hybridflow.algorithms.safe_rlhf import LagrangeMultiplier
from hybridflow.config.algorithm_schema import AlgorithmConfig, ClipConfig, CorrectionConfig
from hybridflow.config.batch_math import BatchMath, scored_at_once, trained_at_once
from hybridflow.config.layouts import Role, generation_layout, generation_ranks, role_layout, role_ranks, roles
from hybridflow.config.model_schema import LayoutConfig
from hybridflow.config.recipe import with_recipe
from hybridflow.config.schema import Config, OptimizerConfig
from hybridflow.config.words import CorrectionLevel, EngineName, KLWhere, Overlap
from hybridflow.crew import Crew
from hybridflow.engine.blueprint import Blueprint, Elsewhere
from hybridflow.engine.native import ForwardEngine, TrainEngine
from hybridflow.engine.options import EngineOptions
from hybridflow.generation.engine import Generator
from hybridflow.generation.engines.interface import GenerationEngine
from hybridflow.generation.limits import GenerationLimits
from hybridflow.generation.records import SamplingParams
from hybridflow.generation.runners import make_runner
from hybridflow.generation.weight_home import WeightHome, WeightMode
from hybridflow.generation.work_source import Balance
from hybridflow.hybrid_engine import HybridEngine, MakeEngine, generation_grid, generation_stage, own_engine
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.hf_import import load_hf
from hybridflow.models.text_classifier import TextClassifier
from hybridflow.models.weights import decoder_shard_map
from hybridflow.observe.trace import Lane, Trace, TraceCategory
from hybridflow.parallel.comm_hook import CommHook
from hybridflow.parallel.mesh import Mesh, Outside, mesh_of
from hybridflow.parallel.optimizer import Decay, LrSchedule
from hybridflow.parallel.optimizer_state import AdamWSettings
from hybridflow.parallel.world import World
from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.policy import FaultPolicy
from hybridflow.trainer.advantage import Advantages, KlPenalty, SoftOverlong
from hybridflow.trainer.engine_options import DTYPES, MIB, engine_options, grid_of, train_options, weight_mode
from hybridflow.trainer.inputs import Inputs, model_shape, text_folder
from hybridflow.trainer.rewards.functions import FunctionPart
from hybridflow.trainer.rewards.inputs import RewardClassifier, RewardDecoder
from hybridflow.trainer.rewards.models import ClassifierPart, DecoderPart, Rereader
from hybridflow.trainer.rewards.part import RewardPart
from hybridflow.trainer.rewards.source import Rewards, WeightedPart
from hybridflow.trainer.roles import Reduction, ScoringRole, TrainedRole
from hybridflow.weight_route import ReshardCheck


@dataclass(frozen=True)
class Builder:
    """Makes the parts of a run. Engines are collective: every rank makes the same ones in the same order."""

    inputs: Inputs
    world: World
    trace: Trace
    comm_hook: CommHook | None = None

    @property
    def config(self) -> Config:
        return self.inputs.config

    @property
    def seed(self) -> int:
        return self.config.train.seed

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.train.mixed_precision]

    def actor(self, updates: int, temperature: float) -> TrainedRole:
        """The actor with its start weights; its learning rate ends after `updates` optimizer steps.

        `temperature` is that of the distribution it is trained on: the sampling temperature, 1 in supervised training.
        """
        return self._trained(Role.ACTOR, Head.LANGUAGE_MODEL, self.config.model.path, self.config.train.optimizer,
                             updates, temperature)

    def scorer(self, updates: int) -> TrainedRole:
        """A reward model that learns, in the actor's place: the start weights under a score head."""
        return self._trained(Role.ACTOR, Head.SCORE, self.config.model.path, self.config.train.optimizer, updates)

    def critic(self, updates: int) -> TrainedRole:
        path = self.config.model.critic.path or self.config.model.path
        return self._trained(Role.CRITIC, Head.VALUE, path, self._critic_optimizer(), updates)

    def cost_critic(self, updates: int) -> TrainedRole:
        """The value model of costs, which learns as the critic does."""
        path = self.config.model.cost_critic.path or self.config.model.path
        return self._trained(Role.COST_CRITIC, Head.VALUE, path, self._critic_optimizer(), updates)

    def costs(self) -> Rewards:
        """The cost model if there is one, else the cost function; a cost is judged as a reward is."""
        scorer = self.inputs.costs
        assert scorer is not None, "the config was checked"
        return Rewards([WeightedPart(self._decoder_part(Role.COST, scorer) if isinstance(scorer, RewardDecoder)
                                     else self._reward_part(scorer), FaultPolicy({}))], judged="cost")

    def multiplier(self) -> LagrangeMultiplier:
        safe = self.config.algorithm.safe
        return LagrangeMultiplier.of(safe.multiplier, lr=safe.multiplier_lr, limit=safe.cost_limit)

    def reference(self) -> ScoringRole:
        """The actor's start, asked about the same distribution as the actor."""
        return self._scoring(Role.REFERENCE, Head.LANGUAGE_MODEL, self.config.model.path,
                             self.config.generation.temperature)

    def generator(self) -> tuple[GenerationEngine, Mesh]:
        """The actor's folder loaded straight into the generation layout, for answering alone."""
        model = self.inputs.model
        mesh = Mesh(grid_of(generation_layout(self.config, self.world.size)), self.world)
        if self.config.generation.engine is EngineName.VLLM:
            return self._loaded_vllm(model, mesh), mesh
        layers = self.config.generation.layout.layers_per_stage
        stage = generation_stage(model, mesh, self.dtype, layers_per_stage=layers)
        storages = {name: param.data for name, param in stage.named_parameters()}
        shard_map = decoder_shard_map(model, mesh.grid, Head.LANGUAGE_MODEL, None, layers)
        load_hf(self.config.model.path, storages, shard_map, self.world.rank)
        runner = make_runner(stage, mesh, owns_weights=True, batch_invariant=self.config.generation.batch_invariant)
        generator = Generator(stage, mesh, model, runner, self._limits, self.inputs.tokenizer.decode)
        generator.wake()
        return generator, mesh

    def hybrid(self, actor: TrainedRole) -> HybridEngine:
        """The actor's generator; among the actor's own ranks, each sits where it has to receive least."""
        config, ranks, train = self.config, generation_ranks(self.config, self.world.size), actor.blueprint
        wanted, apart = generation_layout(config, self.world.size), set(ranks) != set(train.grid.ranks)
        layers = wanted.layers_per_stage
        grid = grid_of(wanted, ranks) if apart else generation_grid(
            train.shard_map, train.grid, train.model, grid_of(wanted, ranks).layout, self.world.nodes,
            within_node=config.generation.layout.within_node, layers_per_stage=layers)
        return HybridEngine(actor.trainer, mesh_of(grid, self.world), self._make_engine(apart),
                            bucket_bytes=config.generation.reshard_bucket_mb * MIB,
                            check=ReshardCheck(config.generation.reshard_check.value),
                            home_map=decoder_shard_map(train.model, grid, Head.LANGUAGE_MODEL, None, layers))

    def _make_engine(self, apart: bool) -> MakeEngine:
        """What makes the engine of generation.engine; `apart`: on other ranks than train the actor."""
        if self.config.generation.engine is EngineName.VLLM:
            return lambda train, mesh: self._vllm(train.model, mesh)
        mode = WeightMode.PACKED if apart else weight_mode(self.config, self.dtype, self.world.device)
        return partial(own_engine, limits=self._limits, decode=self.inputs.tokenizer.decode, weights=mode,
                       layers_per_stage=self.config.generation.layout.layers_per_stage)

    @property
    def generates_alone(self) -> bool:
        """Whether the ranks that generate have no other role, and may keep the weights."""
        others = {rank for role in roles(self.config) for rank in role_ranks(self.config, role, self.world.size)}
        return not others.intersection(generation_ranks(self.config, self.world.size))

    def _loaded_vllm(self, model: ModelConfig, mesh: Mesh) -> GenerationEngine:
        home, engine = self._vllm(model, mesh)
        load_hf(self.config.model.path, home.take({}), home.shard_map, self.world.rank)
        home.ready()
        engine.wake()
        return engine

    def _vllm(self, model: ModelConfig, mesh: Mesh) -> tuple[WeightHome, GenerationEngine]:
        from hybridflow.generation.engines.vllm import vllm_engine  # imported only where it is chosen

        tokenizer = text_folder(self.config) if self.inputs.ends.strings else None
        return vllm_engine(model, mesh, self.dtype, self._limits, tokenizer)

    @property
    def balance(self) -> Balance:
        """How replicas come to their prompts."""
        return Balance(self.config.generation.balance.value)

    def crew(self) -> Crew | None:
        """The ranks that work on a batch once it is generated: all, or where generation goes on meanwhile those with a
        role. None on the others. Collective.
        """
        if self.config.generation.overlap is Overlap.NONE:
            return Crew.whole(self.world)
        size = self.world.size
        return Crew.of(self.world, sorted({rank for role in roles(self.config)
                                           for rank in role_ranks(self.config, role, size)}))

    def rewards(self) -> Rewards:
        """Functions and reward models, one or a weighted sum of several."""
        return Rewards([WeightedPart(self._reward_part(part.scorer), part.policy, part.name, part.weight,
                                     part.data_sources) for part in self.inputs.rewards])

    def _reward_part(self, scorer: RewardFunction | RewardDecoder | RewardClassifier) -> RewardPart:
        tokenizer, ends, own = self.inputs.tokenizer, self.inputs.ends, self.config.model.reward_model
        if isinstance(scorer, RewardFunction):
            return FunctionPart(scorer, tokenizer, ends, self.world)
        if isinstance(scorer, RewardDecoder):
            return self._decoder_part(Role.REWARD, scorer)
        offload = self.config.train.offload.roles
        classifier = TextClassifier.open(scorer.path, torch.device("cpu") if offload else self.world.device,
                                         DTYPES[own.dtype or self.config.train.mixed_precision], label=own.label,
                                         pair=own.pair, micro_batch_size=own.micro_batch_size)
        return ClassifierPart(classifier, tokenizer, ends, self.world, offload=offload)

    def _decoder_part(self, role: Role, scorer: RewardDecoder) -> DecoderPart:
        longest = self._model(scorer.path).max_position_embeddings
        reread = None if scorer.tokenizer is None else Rereader(self.inputs.tokenizer, self.inputs.ends,
                                                                scorer.tokenizer, longest)
        return DecoderPart(self._scoring(role, Head.SCORE, scorer.path), self.world, reread)

    def advantages(self) -> Advantages:
        algorithm, buffer = _algorithm(self.config), _algorithm(self.config).overlong_buffer
        assert self.inputs.estimator is not None, "the inputs were read for a run that scores"
        options = AdvantageOptions(algorithm.gamma, algorithm.lam, algorithm.grpo_std_normalise)
        overlong = SoftOverlong(self.config.generation.max_new_tokens, buffer) if buffer else None
        return Advantages(self.inputs.estimator, options, bool(algorithm.normalise_advantages), self._kl_penalty(),
                          overlong)

    def _kl_penalty(self) -> KlPenalty | None:
        kl = _algorithm(self.config).kl
        if kl.where is not KLWhere.REWARD:
            return None
        controller = FixedKl(kl.coef) if kl.target is None else AdaptiveKl(kl.coef, kl.target)
        return KlPenalty(KlEstimator(kl.estimator.value), controller)

    @property
    def resample_rounds(self) -> int:
        """Rounds of generation in which prompts without a signal are replaced; 0: none are."""
        return _algorithm(self.config).resample_rounds or 0

    def actor_objective(self) -> ActorObjective:
        algorithm, kl = _algorithm(self.config), _algorithm(self.config).kl
        in_loss = kl.where is KLWhere.LOSS
        assert self.inputs.policy_loss is not None, "the inputs were read for a run that scores"
        return ActorObjective(_clip(algorithm.clip), entropy_coef=algorithm.entropy_coef,
                              kl_coef=kl.coef if in_loss else 0.0,
                              kl_estimator=KlEstimator(kl.estimator.value) if in_loss else None,
                              policy_loss=self.inputs.policy_loss, correction=_correction(algorithm.correction),
                              pretrain_coef=algorithm.safe.pretrain_coef)

    def critic_objective(self) -> CriticObjective:
        return CriticObjective(self.config.algorithm.value_clip, self.config.algorithm.value_loss_coef)

    def sampling(self) -> SamplingParams:
        generation = self.config.generation
        return SamplingParams(generation.max_new_tokens, generation.min_new_tokens, generation.repetition_penalty,
                              generation.temperature, generation.top_k, generation.top_p, generation.min_p,
                              self.inputs.ends.ids, self.inputs.ends.strings)

    def reduction(self) -> Reduction:
        algorithm = _algorithm(self.config)
        kind = LossReduction(algorithm.loss_reduction.value)
        if kind is not LossReduction.CONSTANT_LENGTH:
            return Reduction(kind)
        return Reduction(kind, algorithm.constant_length or self.config.generation.max_new_tokens)

    def _trained(self, role: Role, head: Head, path: str | None, optimizer: OptimizerConfig,
                 updates: int, temperature: float = 1.0) -> TrainedRole:
        model = self._model(path)
        adamw = AdamWSettings(tuple(optimizer.betas), optimizer.eps, optimizer.weight_decay, optimizer.clip_grad_norm)
        lr = LrSchedule(optimizer.lr, optimizer.warmup_steps, updates, Decay(optimizer.decay.value), optimizer.min_lr)
        blueprint, mesh = self._blueprint(role, model, head, temperature)
        if isinstance(mesh, Outside):
            engine = Elsewhere(blueprint, mesh)
        else:
            engine = TrainEngine(model, mesh, head, blueprint.options, adamw=adamw, lr=lr,
                                 train=train_options(self.config, self.comm_hook))
            self._start(engine, path)
        return TrainedRole(engine, scored_at_once(self.config), trained_at_once(self.config), self.reduction(),
                           self._lane)

    def _scoring(self, role: Role, head: Head, path: str | None, temperature: float = 1.0) -> ScoringRole:
        model = self._model(path)
        blueprint, mesh = self._blueprint(role, model, head, temperature)
        if isinstance(mesh, Outside):
            engine = Elsewhere(blueprint, mesh)
        else:
            engine = ForwardEngine(model, mesh, head, blueprint.options)
            self._start(engine, path)
        return ScoringRole(engine, scored_at_once(self.config), self._lane)

    def _blueprint(self, role: Role, model: ModelConfig, head: Head,
                   temperature: float) -> tuple[Blueprint, Mesh | Outside]:
        """What all ranks know of a role's engine, and this rank's place in it. Collective."""
        layout = role_layout(self.config, role, self.world.size)
        grid = grid_of(layout, role_ranks(self.config, role, self.world.size))
        return Blueprint(model, grid, head, self._options(layout, head, temperature)), mesh_of(grid, self.world)

    def _options(self, layout: LayoutConfig, head: Head, temperature: float) -> EngineOptions:
        """The log-probs of a language model have the generator's bits where that is asked for; nobody compares values.
        """
        options = engine_options(self.config, layout, self.dtype, temperature)
        return replace(options, batch_invariant=self.config.generation.batch_invariant and head is Head.LANGUAGE_MODEL)

    def _model(self, path: str | None) -> ModelConfig:
        return model_shape(self.config, path, self.inputs.tokenizer)

    def _start(self, engine: ForwardEngine, path: str | None) -> None:
        if path is None:
            engine.draw(self.seed)
        else:
            engine.load(path, self.seed)
        engine.end_turn()

    @property
    def _limits(self) -> GenerationLimits:
        generation = self.config.generation
        limits = GenerationLimits(max_step_tokens=generation.max_step_tokens)
        if generation.kv_cache_mb is not None:
            limits = replace(limits, max_cache_bytes=generation.kv_cache_mb * MIB)
        return limits if generation.max_rows is None else replace(limits, max_batch_rows=generation.max_rows)

    @property
    def _lane(self) -> Lane:
        return self.trace.lane(TraceCategory.PIPELINE)

    def _critic_optimizer(self) -> OptimizerConfig:
        own = self.config.train.critic_optimizer
        given = {name: value for name, value in vars(own).items() if value is not None}
        return replace(self.config.train.optimizer, **given)


def _algorithm(config: Config) -> AlgorithmConfig:
    """The algorithm block with nothing left open."""
    return with_recipe(config).algorithm


def _clip(clip: ClipConfig) -> Clip:
    """The bounds; those of a policy loss that has none stay at the defaults, unread."""
    given = {name: value for name, value in vars(clip).items() if value is not None}
    return Clip(**given)


def _correction(correction: CorrectionConfig) -> Correction | None:
    if correction.level is CorrectionLevel.NONE:
        return None
    return Correction(RatioOf(correction.level.value), Bounding(correction.how.value), correction.low, correction.high)


def rl_updates(config: Config, world_size: int) -> int:
    """Optimizer steps of a whole run."""
    return config.train.total_steps * BatchMath.of(config, world_size).updates_per_step
