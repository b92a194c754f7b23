"""What is wrong with a config, in a form that a person can act on, and all of it at once.

Owns the fault, the error that carries every fault, and the search for the key that was meant. Reads no config.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any

# Names that other systems give to our keys: the typo `tensor_parallel_szie` should lead to train.layout.tp.
OTHER_NAMES = {
    "tensor_parallel_size": "train.layout.tp",
    "tensor_model_parallel_size": "train.layout.tp",
    "pipeline_parallel_size": "train.layout.pp",
    "pipeline_model_parallel_size": "train.layout.pp",
    "virtual_pipeline_model_parallel_size": "train.layout.vpp",
    "virtual_pipeline_parallel_size": "train.layout.vpp",
    "context_parallel_size": "train.layout.cp",
    "data_parallel_size": "train.layout.dp",
    "world_size": "train.layout.dp",
    "learning_rate": "train.optimizer.lr",
    "critic_lr": "train.critic_optimizer.lr",
    "max_grad_norm": "train.optimizer.clip_grad_norm",
    "batch_size": "train.global_batch_size",
    "ppo_mini_batch_size": "train.global_batch_size",
    "mini_batch_size": "train.global_batch_size",
    "ppo_micro_batch_size": "train.micro_batch_size",
    "ppo_max_token_len_per_gpu": "train.micro_batch_tokens",
    "max_tokens_per_gpu": "train.micro_batch_tokens",
    "log_prob_max_token_len_per_gpu": "train.forward_micro_batch_tokens",
    "pipeline_schedule": "train.schedule",
    "gradient_checkpointing": "train.recompute",
    "activation_checkpointing": "train.recompute",
    "recompute_granularity": "train.recompute",
    "recompute_num_layers": "train.recompute_layers",
    "reduce_bucket_size": "train.reduce_bucket_mb",
    "initial_loss_scale": "train.loss_scale",
    "optimizer_offload": "train.offload.optimizer",
    "param_offload": "train.offload.roles",
    "ppo_epochs": "train.epochs_per_rollout",
    "max_steps": "train.total_steps",
    "rollout_batch_size": "data.prompts_per_step",
    "train_batch_size": "data.prompts_per_step",
    "truncation": "data.overlong",
    "apply_chat_template_kwargs": "data.chat_template_kwargs",
    "num_generations": "generation.samples_per_prompt",
    "max_response_length": "generation.max_new_tokens",
    "max_completion_length": "generation.max_new_tokens",
    "clip_eps": "algorithm.clip.low",
    "cliprange": "algorithm.clip.low",
    "cliprange_value": "algorithm.value_clip",
    "vf_coef": "algorithm.value_loss_coef",
    "kl_coef": "algorithm.kl.coef",
    "beta": "algorithm.kl.coef",
    "adv_estimator": "algorithm.name",
    "loss_agg_mode": "algorithm.loss_reduction",
    "loss_mode": "algorithm.policy_loss",
    "norm_adv_by_std_in_grpo": "algorithm.grpo_std_normalise",
    "rollout_correction": "algorithm.correction",
    "rollout_is": "algorithm.correction.level",
    "rollout_is_threshold": "algorithm.correction.high",
    "overlong_buffer_len": "algorithm.overlong_buffer",
    "output_dir": "logging.dir",
}


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        key: the dotted key, e.g. "train.layout.tp"; of an override that cannot be read, its text.
        value: what was found there.
        rule: what it breaks, as a clause: "2 ranks cannot be cut in 3".
        choice: what would work, as a clause: "choose 1 or 2"; "" where nothing can be named.
    Example: `str(Fault("train.layout.tp", 3, "does not divide the 8 ranks", "choose 1, 2, 4 or 8"))` is
    "train.layout.tp = 3: does not divide the 8 ranks; choose 1, 2, 4 or 8".
    """

    key: str
    value: object
    rule: str
    choice: str = ""

    def __str__(self) -> str:
        return f"{self.key} = {shown(self.value)}: {self.rule}" + (f"; {self.choice}" if self.choice else "")


class ConfigError(ValueError):
    """Every fault of a config. `faults` is a tuple of `Fault`; the message has a line for each."""

    def __init__(self, source: str, faults: Iterable[Fault]) -> None:
        self.source = source
        self.faults = tuple(faults)
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {fault}" for fault in self.faults)]))


def require_none(source: str, faults: Sequence[Fault]) -> None:
    """Raises:
        ConfigError: with all `faults`, if there are any.
    """
    if faults:
        raise ConfigError(source, faults)


def is_within(key: str, outer: str) -> bool:
    """Whether a dotted key is `outer`, or one in its block or list. Example: is_within("data.files[0]", "data.files").
    """
    return key == outer or key.startswith((f"{outer}.", f"{outer}["))


def shown(value: object) -> str:
    """A value as it would be written in YAML, cut where it is long."""
    value = plain(value)
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def plain(value: object) -> Any:
    """A value of a config with words in the place of enums, and dicts in the place of blocks."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(vars(value)[field.name]) for field in fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def nearest_key(unknown: str, block: Iterable[str], known: Iterable[str]) -> str | None:
    """The dotted key that was probably meant by the dotted key `unknown`; None where nothing is near.

    Looks in this order: a key of the same block, the same name in another block, a name that other systems use, a
    similar name anywhere.

    Args:
        unknown: dotted key as it was written.
        block: names of the keys of the block it was written in.
        known: every dotted key of the schema.
    """
    prefix, _, name = unknown.rpartition(".")
    by_name = {}
    for key in sorted(known, key=lambda key: key.count(".")):  # the least nested of keys with one name
        by_name.setdefault(key.rpartition(".")[2], key)
    if same_block := get_close_matches(name, list(block), n=1, cutoff=0.7):
        return f"{prefix}.{same_block[0]}" if prefix else same_block[0]
    if name in by_name:
        return by_name[name]
    if other := get_close_matches(name, OTHER_NAMES, n=1, cutoff=0.8):
        return OTHER_NAMES[other[0]]
    similar = get_close_matches(name, by_name, n=1, cutoff=0.7)
    return by_name[similar[0]] if similar else None


def listed(choices: Iterable[object], conjunction: str = "or") -> str:
    """"1, 2 or 4"."""
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {conjunction} {words[-1]}"
