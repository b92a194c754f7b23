"""Keys that have no effect under the rest of a config: setting one is refused, so that no knob is ever dead.

A key counts as set when it differs from its default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass

from hybridflow.config.bounds import value_at
from hybridflow.config.faults import Fault
from hybridflow.config.schema import Config
from hybridflow.config.words import AlgorithmName, DataSource, Decay, KLWhere, LossReduction


@dataclass(frozen=True)
class Idle:
    """While `when` holds, `keys` do nothing, `because`; `choice` makes them count."""

    when: Callable[[Config], bool]
    keys: tuple[str, ...]
    because: str
    choice: str


IDLE = (
    Idle(lambda c: c.algorithm.name is AlgorithmName.GRPO,
         ("model.critic", "train.critic_optimizer", "algorithm.gamma", "algorithm.lam", "algorithm.value_clip",
          "algorithm.value_loss_coef", "algorithm.normalise_advantages"),
         "has no effect with grpo, which has no critic", "remove it, or choose algorithm.name ppo"),
    Idle(lambda c: c.algorithm.name is AlgorithmName.PPO, ("algorithm.grpo_std_normalise",),
         "has no effect with ppo", "remove it, or choose algorithm.name grpo"),
    Idle(lambda c: c.algorithm.kl.where is KLWhere.NONE,
         ("algorithm.kl.estimator", "algorithm.kl.coef", "algorithm.kl.target", "model.reference"),
         "has no effect without a KL penalty", "choose algorithm.kl.where reward or loss"),
    Idle(lambda c: c.algorithm.loss_reduction is not LossReduction.CONSTANT_LENGTH, ("algorithm.constant_length",),
         "has no effect with this loss_reduction", "choose algorithm.loss_reduction constant-length"),
    Idle(lambda c: c.model.reward_model.path is None, ("model.reward_model.layout",),
         "has no effect without a reward model", "give model.reward_model.path"),
    Idle(lambda c: c.model.reward_model.path is not None, ("reward",),
         "has no effect with a reward model", "remove it, or model.reward_model.path"),
    Idle(lambda c: c.reward.function is not None, ("reward.reasoning_gym",),
         "has no effect with a reward function", "remove it, or reward.function"),
    Idle(lambda c: c.data.source is DataSource.REASONING_GYM, ("data.train_files", "data.test_files"),
         "has no effect with reasoning_gym", "choose data.source jsonl or parquet"),
    Idle(lambda c: c.data.source is not DataSource.REASONING_GYM,
         ("data.tasks", "data.test_tasks", "data.size", "data.test_size", "data.prompt_template",
          "reward.reasoning_gym"),
         "has no effect with prompts from files", "choose data.source reasoning_gym"),
    Idle(lambda c: c.train.optimizer.decay is Decay.CONSTANT, ("train.optimizer.min_lr",),
         "has no effect with a constant rate", "choose train.optimizer.decay linear or cosine"),
    Idle(lambda c: (c.train.critic_optimizer.decay or c.train.optimizer.decay) is Decay.CONSTANT,
         ("train.critic_optimizer.min_lr",),
         "has no effect with a constant rate", "choose train.critic_optimizer.decay linear or cosine"),
)


def idle_keys(config: Config) -> Iterator[Fault]:
    """A fault for each key that is set and does nothing."""
    default = Config()
    for idle in IDLE:
        if idle.when(config):
            for key in idle.keys:
                value = value_at(config, key)
                if value != value_at(default, key):
                    yield Fault(key, _written(value), idle.because, idle.choice)


def _written(value: object) -> object:
    """A whole block is shown as such: its dataclass would print every default."""
    return "{...}" if is_dataclass(value) else value
