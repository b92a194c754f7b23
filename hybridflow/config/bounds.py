"""What one value of a config may be, whatever the others are: a table of bounds and the function that checks it.

Rules between keys are `validate`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from math import isfinite
from typing import Any

from hybridflow.config.faults import Fault
from hybridflow.config.schema import Config
from hybridflow.generation.records import is_moderate

Test = Callable[[Any], bool]
MOST_MADE = 10**7  # prompts of some KiB each


@dataclass(frozen=True)
class Bound:
    """A rule for the value of each of `keys`; null is always allowed where the schema allows it."""

    keys: tuple[str, ...]
    test: Test
    rule: str
    choice: str


BOUNDS = (
    Bound(
        ("train.total_steps", "train.global_batch_size", "train.micro_batch_size", "train.gradient_accumulation_steps",
         "train.epochs_per_rollout", "train.forward_micro_batch_size", "train.micro_batch_tokens",
         "train.forward_micro_batch_tokens", "train.recompute_layers", "train.reduce_bucket_mb",
         "train.loss_scale_window", "algorithm.safe.pretrain_batch_size", "generation.samples_per_prompt",
         "generation.max_new_tokens", "generation.max_rows", "generation.max_step_tokens",
         "generation.kv_cache_mb", "generation.max_staleness",
         "generation.reshard_bucket_mb", "algorithm.constant_length",
         "data.prompts_per_step", "data.max_prompt_length", "data.shuffle_buffer", "evaluation.every_steps",
         "evaluation.prompts", "checkpoint.export_every_steps", "sft.steps", "logging.trace_step", "preference.steps",
         "reward.memory_mb", "tools.max_observation_tokens", "model.reward_model.micro_batch_size"),
        lambda n: 1 <= n <= 1e9, "must lie in [1, 1e9]", "choose 1 or more, and less than a billion",
    ),
    # Processes of one rank; and prompts that are made and held in memory before the first step.
    Bound(("reward.workers",), lambda n: 1 <= n <= 1024, "must lie in [1, 1024]", "choose e.g. 4, or null"),
    Bound(("data.size",), lambda n: 1 <= n <= MOST_MADE, f"must lie in [1, {MOST_MADE}]", "choose e.g. 4096"),
    Bound(("data.test_size",), lambda n: 0 <= n <= MOST_MADE, f"must lie in [0, {MOST_MADE}]", "choose e.g. 256"),
    Bound(
        ("train.seed", "train.optimizer.warmup_steps", "train.critic_optimizer.warmup_steps", "generation.top_k",
         "generation.min_new_tokens", "algorithm.resample_rounds", "algorithm.overlong_buffer", "evaluation.top_k",
         "logging.samples", "train.max_nonfinite_steps", "model.reward_model.label"),
        lambda n: n >= 0, "must not be negative", "choose 0 or more",
    ),
    Bound(
        ("train.optimizer.lr", "train.critic_optimizer.lr", "train.optimizer.weight_decay",
         "train.critic_optimizer.weight_decay", "train.optimizer.min_lr", "train.critic_optimizer.min_lr",
         "algorithm.entropy_coef", "algorithm.safe.pretrain_coef",
         "algorithm.kl.coef", "algorithm.value_loss_coef", "preference.nll_coef",
         "preference.centre_coef", "preference.desirable_weight", "preference.undesirable_weight"),
        lambda x: 0 <= x < float("inf"), "must be a finite number that is not negative", "choose 0 or more",
    ),
    Bound(
        ("train.optimizer.eps", "train.critic_optimizer.eps", "train.optimizer.clip_grad_norm",
         "train.critic_optimizer.clip_grad_norm", "algorithm.value_clip", "algorithm.kl.target",
         "algorithm.safe.multiplier_lr", "algorithm.clip.high", "preference.beta"),
        lambda x: 0 < x < float("inf"), "must be a finite number above 0", "choose a number above 0",
    ),
    Bound(("reward.timeout_s", "cost.timeout_s", "tools.timeout_s"), lambda x: 1e-3 <= x <= 1e6,
          "must lie in [0.001, 1e6]", "choose a number of seconds, e.g. 60.0"),
    Bound(("train.timeout_s",), lambda x: 1 <= x <= 1e6, "must lie in [1, 1e6]",
          "choose a number of seconds in which every rank has started, e.g. 600.0"),
    Bound(("tools.max_turns",), lambda n: n >= 2, "must be at least 2", "choose 2 or more, or tools.file null"),
    Bound(("algorithm.safe.multiplier",), lambda x: 1e-3 <= x <= 1e3, "must lie in [0.001, 1000]", "choose e.g. 1.0"),
    Bound(("algorithm.safe.cost_limit",), isfinite, "must be a finite number", "choose e.g. 0.0"),
    Bound(("train.loss_scale",), lambda x: 1 <= x <= 2.0**32, "must lie in [1, 2^32]", "choose e.g. 65536.0"),
    Bound(("algorithm.clip.low",), lambda x: 0 < x <= 1, "must lie in (0, 1]", "choose e.g. 0.2, or 1.0 for none"),
    Bound(("algorithm.correction.low",), lambda x: 0 <= x <= 1, "must lie in [0, 1]", "choose e.g. 0.5"),
    Bound(("algorithm.correction.high",), lambda x: 1 <= x < float("inf"), "must be a finite number of at least 1",
          "choose e.g. 2.0"),
    Bound(("algorithm.clip.dual",), lambda x: 1 < x < float("inf"), "must be above 1", "choose e.g. 3.0"),
    Bound(("algorithm.gamma", "algorithm.lam"), lambda x: 0 <= x <= 1, "must lie in [0, 1]", "choose e.g. 1.0"),
    Bound(("evaluation.samples_per_prompt",), lambda n: 1 <= n <= 256, "must lie in [1, 256]", "choose e.g. 8"),
    Bound(("generation.temperature", "evaluation.temperature"), lambda x: x == 0 or is_moderate(x),
          "must be 0 (greedy) or lie in [1e-6, 1e6]",
          "choose e.g. 1.0"),
    Bound(("generation.repetition_penalty",), is_moderate, "must lie in [1e-6, 1e6]",
          "choose 1.0 for none, or e.g. 1.1"),
    Bound(("generation.min_p", "evaluation.min_p"), lambda x: 0 <= x <= 1, "must lie in [0, 1]",
          "choose 0.0 for no cut, or e.g. 0.05"),
    Bound(("generation.top_p", "evaluation.top_p"), lambda x: 0 < x <= 1,
          "must lie in (0, 1]", "choose 1.0 for no cut"),
    Bound(("train.optimizer.betas", "train.critic_optimizer.betas"),
          lambda b: len(b) == 2 and all(0 <= x < 1 for x in b), "must be two numbers in [0, 1)", "choose [0.9, 0.95]"),
    Bound(("train.zero_stage",), lambda n: n in (0, 1, 2),
          "weights are split by tensor and pipeline parallelism here, not by ZeRO", "choose 0, 1 or 2"),
    Bound(("preference.label_smoothing",), lambda x: 0 <= x < 0.5, "must lie in [0, 0.5)", "choose 0.0, or e.g. 0.1"),
    Bound(("sft.stop_at_accuracy",), lambda x: 0 < x <= 1, "is no accuracy that can be reached", "choose e.g. 0.5"),
    Bound(("sft.tokenizer_vocab_size",), lambda n: n >= 16, "is too small for a vocabulary", "choose e.g. 256"),
)


def out_of_bounds(config: Config) -> Iterator[Fault]:
    """A fault for each value that breaks its own bound."""
    for bound in BOUNDS:
        for key in bound.keys:
            value = value_at(config, key)
            if value is not None and not bound.test(value):
                yield Fault(key, value, bound.rule, bound.choice)


def value_at(config: Config, key: str) -> Any:
    """The value of a dotted key, none of whose blocks is null."""
    return reduce(getattr, key.split("."), config)
