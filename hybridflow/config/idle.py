"""Keys that have no effect under the rest of a config: setting one is refused, so that no knob is ever dead.

A key counts as set when it differs from its default. Keys that a command does not read are `unread`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass

from hybridflow.algorithms.registry import Need
from hybridflow.config.bounds import value_at
from hybridflow.config.command import Command
from hybridflow.config.data_schema import holds_out, task_names, trains_on_files
from hybridflow.config.faults import Fault
from hybridflow.config.recipe import kl_where_of, loss_entry, needs_of, reads_option, with_recipe
from hybridflow.config.reward_schema import asks_task_scorers, reward_models
from hybridflow.config.schema import Config
from hybridflow.config.words import (
    CorrectionHow,
    CorrectionLevel,
    DataSource,
    Decay,
    KLWhere,
    LossReduction,
    MixedPrecision,
    Overlap,
    Recompute,
)


@dataclass(frozen=True)
class Idle:
    """While `when` holds, `keys` do nothing, `because`; `choice` makes them count. `but_in` are commands in which they
    count all the same.
    """

    when: Callable[[Config], bool]
    keys: tuple[str, ...]
    because: str
    choice: str
    but_in: tuple[Command, ...] = ()


def _the_tasks_alone_score(config: Config) -> bool:
    return asks_task_scorers(config.reward, config.model.reward_model) and not config.reward.mixture


def _only_models_score(config: Config) -> bool:
    """No function runs."""
    if config.reward.mixture:
        return all(part.model is not None for part in config.reward.mixture)
    return config.model.reward_model.path is not None


def _answers_to_nobody(config: Config) -> bool:
    """Files without held-out ones. (Tasks always have held-out prompts, or `data_rules` asks for them.)"""
    files = config.data.source is not DataSource.REASONING_GYM
    return files and config.evaluation.every_steps is not None and not holds_out(config.data)


IDLE = (
    Idle(lambda c: Need.CRITIC not in needs_of(c.algorithm),
         ("model.critic", "placement.critic", "train.critic_optimizer", "algorithm.value_clip",
          "algorithm.value_loss_coef"),
         "has no effect without a critic, which this algorithm has not", "remove it, or choose algorithm.name ppo"),
    Idle(lambda c: not reads_option(c.algorithm, "gamma"), ("algorithm.gamma",),
         "has no effect with this advantage, one number a response", "remove it, or choose algorithm.name ppo"),
    Idle(lambda c: not reads_option(c.algorithm, "lam"), ("algorithm.lam",),
         "has no effect with this advantage", "remove it, or choose algorithm.name ppo"),
    Idle(lambda c: not reads_option(c.algorithm, "std_normalise"), ("algorithm.grpo_std_normalise",),
         "has no effect with this advantage", "remove it, or choose algorithm.name grpo"),
    Idle(lambda c: loss_entry(c.algorithm).clip is None, ("algorithm.clip.low", "algorithm.clip.high"),
         "has no effect with this policy loss, which has no ratio", "remove it, or choose algorithm.policy_loss ppo"),
    Idle(lambda c: not loss_entry(c.algorithm).has_dual_clip, ("algorithm.clip.dual",),
         "has no effect with this policy loss", "remove it, or choose algorithm.policy_loss ppo"),
    Idle(lambda c: c.algorithm.correction.level is CorrectionLevel.NONE,
         ("algorithm.correction.how", "algorithm.correction.high"),
         "has no effect without a correction", "choose algorithm.correction.level token or sequence"),
    Idle(lambda c: CorrectionLevel.NONE is c.algorithm.correction.level
         or c.algorithm.correction.how is CorrectionHow.TRUNCATE, ("algorithm.correction.low",),
         "has no effect where no ratio is masked", "choose algorithm.correction.how mask, with a level"),
    Idle(lambda c: c.tools.file is None,
         ("tools.call", "tools.max_turns", "tools.max_observation_tokens", "tools.timeout_s", "tools.on_error",
          "tools.role", "tools.wrapper"),
         "has no effect without tools", "give tools.file"),
    Idle(lambda c: c.tools.wrapper is not None, ("tools.role",),
         "has no effect with a wrapper", "remove it, or tools.wrapper"),
    Idle(lambda c: c.generation.overlap is not Overlap.PARTIAL, ("generation.max_staleness",),
         "has no effect where answers do not go on over several steps", "choose generation.overlap partial"),
    Idle(lambda c: kl_where_of(c.algorithm) is KLWhere.NONE,
         ("algorithm.kl.estimator", "algorithm.kl.coef"),
         "has no effect without a KL penalty", "choose algorithm.kl.where reward or loss"),
    Idle(lambda c: kl_where_of(c.algorithm) is KLWhere.NONE, ("model.reference", "placement.reference"),
         "has no effect without a KL penalty", "choose algorithm.kl.where reward or loss",
         but_in=(Command.DPO, Command.KTO)),
    Idle(lambda c: kl_where_of(c.algorithm) is not KLWhere.REWARD, ("algorithm.kl.target",),
         "has no effect here: only a penalty in the reward is steered",
         "remove it, or choose algorithm.kl.where reward"),
    Idle(lambda c: with_recipe(c).algorithm.loss_reduction is not LossReduction.CONSTANT_LENGTH,
         ("algorithm.constant_length",),
         "has no effect with this loss_reduction", "choose algorithm.loss_reduction constant-length"),
    Idle(lambda c: Need.COST not in needs_of(c.algorithm),
         ("algorithm.safe", "cost", "model.cost_model", "model.cost_critic", "placement.cost", "placement.cost_critic"),
         "has no effect without a bound on costs", "remove it, or choose algorithm.name safe_rlhf"),
    Idle(lambda c: c.model.cost_model.path is not None, ("cost",),
         "has no effect with a cost model", "remove it, or model.cost_model.path"),
    Idle(lambda c: c.model.cost_model.path is None, ("model.cost_model.layout", "placement.cost"),
         "has no effect without a cost model", "give model.cost_model.path"),
    Idle(lambda c: c.algorithm.safe.pretrain_coef == 0, ("algorithm.safe.pretrain_batch_size",),
         "has no effect without a pretraining loss", "give algorithm.safe.pretrain_coef"),
    Idle(lambda c: not reward_models(c.reward, c.model.reward_model),
         ("model.reward_model.layout", "placement.reward", "model.reward_model.label",
          "model.reward_model.pair", "model.reward_model.dtype", "model.reward_model.micro_batch_size"),
         "has no effect without a reward model", "give model.reward_model.path"),
    Idle(lambda c: c.model.reward_model.path is not None,
         ("reward.function", "reward.batched", "reward.reasoning_gym", "reward.mixture"),
         "has no effect with a reward model", "remove it, or model.reward_model.path"),
    Idle(_only_models_score,
         ("reward.timeout_s", "reward.memory_mb", "reward.workers", "reward.on_fault.raised",
          "reward.on_fault.timed_out", "reward.on_fault.wrong_type", "reward.on_fault.crashed",
          "reward.on_fault.out_of_memory"),
         "has no effect where reward models alone score", "remove it"),
    Idle(lambda c: c.reward.function is not None, ("reward.reasoning_gym",),
         "has no effect with a reward function", "remove it, or reward.function"),
    Idle(lambda c: bool(c.reward.mixture), ("reward.function", "reward.batched", "reward.reasoning_gym"),
         "has no effect with a mixture", "remove it, and let a part of reward.mixture have it"),
    Idle(_the_tasks_alone_score, ("reward.batched",),
         "has no effect without a reward function", "give reward.function"),
    Idle(lambda c: bool(c.reward.mixture) and all(part.on_fault for part in c.reward.mixture), ("reward.on_fault",),
         "has no effect where each part of the mixture has its own", "remove it, or on_fault of a part"),
    Idle(lambda c: c.data.source is DataSource.REASONING_GYM, ("data.train_files", "data.test_files"),
         "has no effect with reasoning_gym", "choose data.source jsonl or parquet"),
    Idle(lambda c: c.data.source in (DataSource.JSONL, DataSource.PARQUET),
         ("data.tasks", "data.test_tasks", "data.size", "data.test_size", "data.prompt_template",
          "reward.reasoning_gym"),
         "has no effect with prompts from files", "choose data.source reasoning_gym"),
    Idle(lambda c: c.data.source is DataSource.MIXTURE, ("data.tasks", "data.train_files", "data.size"),
         "has no effect with a mixture", "name files and tasks in data.mixture"),
    Idle(lambda c: c.data.source is DataSource.MIXTURE and not c.data.test_tasks, ("data.test_size",),
         "has no effect in a mixture without data.test_tasks", "name data.test_tasks, or remove it"),
    Idle(lambda c: c.data.source is DataSource.MIXTURE and not task_names(c.data),
         ("data.prompt_template", "reward.reasoning_gym"),
         "has no effect in a mixture of files alone", "remove it, or name a task"),
    Idle(lambda c: c.data.source is not DataSource.MIXTURE, ("data.mixture",),
         "has no effect with this source", "choose data.source mixture"),
    Idle(lambda c: not trains_on_files(c.data), ("data.streaming",),
         "has no effect without files of training prompts", "remove it"),
    Idle(lambda c: not (c.data.streaming and c.data.shuffle), ("data.shuffle_buffer",),
         "has no effect where rows are not streamed and shuffled", "choose data.streaming true and data.shuffle true"),
    Idle(lambda c: c.evaluation.every_steps is None,
         ("evaluation.samples_per_prompt", "evaluation.temperature", "evaluation.save_answers"),
         "has no effect without an evaluation", "give evaluation.every_steps"),
    Idle(_answers_to_nobody, ("evaluation",),
         "has no effect without held-out prompts", "name data.test_files, or in a mixture data.test_tasks"),
    Idle(lambda c: c.evaluation.temperature == 0, ("evaluation.top_k", "evaluation.top_p", "evaluation.min_p"),
         "has no effect in greedy decoding", "give evaluation.temperature"),
    Idle(lambda c: c.train.optimizer.decay is Decay.CONSTANT, ("train.optimizer.min_lr",),
         "has no effect with a constant rate", "choose train.optimizer.decay linear or cosine"),
    Idle(lambda c: (c.train.critic_optimizer.decay or c.train.optimizer.decay) is Decay.CONSTANT,
         ("train.critic_optimizer.min_lr",),
         "has no effect with a constant rate", "choose train.critic_optimizer.decay linear or cosine"),
    Idle(lambda c: c.train.micro_batch_tokens is not None, ("train.micro_batch_size",),
         "has no effect where train.micro_batch_tokens cuts the micro-batches",
         "remove one of the two; over a file, override it with train.micro_batch_size=null"),
    Idle(lambda c: c.train.micro_batch_tokens is not None, ("train.gradient_accumulation_steps",),
         "has no effect where train.micro_batch_tokens cuts the micro-batches", "remove it, or choose null"),
    Idle(lambda c: c.train.forward_micro_batch_tokens is not None, ("train.forward_micro_batch_size",),
         "has no effect where train.forward_micro_batch_tokens cuts the micro-batches",
         "remove one of the two; over a file, override it with train.forward_micro_batch_size=null"),
    Idle(lambda c: c.train.recompute is Recompute.NONE, ("train.recompute_layers",),
         "has no effect where nothing is recomputed", "choose train.recompute selective or full"),
    Idle(lambda c: c.train.mixed_precision is not MixedPrecision.FP16,
         ("train.loss_scale", "train.loss_scale_window"),
         "has no effect in a precision that needs no loss scaling", "remove it, or choose train.mixed_precision fp16"),
)


def idle_keys(config: Config, command: Command = Command.TRAIN) -> Iterator[Fault]:
    """A fault for each key that is set and does nothing."""
    return faults_of(tuple(idle for idle in IDLE if command not in idle.but_in), config)


def faults_of(table: tuple[Idle, ...], config: Config) -> Iterator[Fault]:
    """A fault for each key of a table of rules that is set and does nothing, each once; of a block, for each key in
    it.
    """
    default, seen = Config(), set[str]()
    for idle in table:
        if idle.when(config):
            for name in idle.keys:
                for key, value in _set_keys(name, value_at(config, name), value_at(default, name)):
                    if key not in seen:
                        yield Fault(key, value, idle.because, idle.choice)
                    seen.add(key)


def _set_keys(key: str, value: object, default: object) -> Iterator[tuple[str, object]]:
    """The keys in `key` that differ from their defaults, but for lists that a file empties, to do without those of its
    base. A block that is null by default is shown as a whole.
    """
    if value in (default, []):
        return
    if not is_dataclass(value) or not is_dataclass(default):
        yield key, "{...}" if is_dataclass(value) else value
        return
    for field in fields(value):
        yield from _set_keys(f"{key}.{field.name}", vars(value)[field.name], vars(default)[field.name])
