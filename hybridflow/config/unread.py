"""Keys that a command does not read, whatever the rest of the config: setting one is refused, or told.

`train` and `sft` have files of their own. `generate` and `export` are given the file of a training run, and so may
`init_trainer` be: there the file may hold such keys, but an override or a dict that was written for the call may not
(`check` and `reading` see to that).
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config.command import Command
from hybridflow.config.faults import Fault
from hybridflow.config.idle import Idle, faults_of
from hybridflow.config.schema import Config


def _always(config: Config) -> bool:
    return True


def _never_evaluated(config: Config) -> bool:
    return config.evaluation.every_steps is None


def _starts_from_a_folder(config: Config) -> bool:
    return config.model.path is not None


def _judged_otherwise(config: Config) -> bool:
    """The scorers of the tasks are not asked."""
    return config.reward.function is not None or config.model.reward_model.path is not None


LEARNING = ("algorithm.name", "algorithm.gamma", "algorithm.lam", "algorithm.clip", "algorithm.value_clip",
            "algorithm.value_loss_coef", "algorithm.entropy_coef", "algorithm.kl", "algorithm.normalise_advantages",
            "algorithm.grpo_std_normalise", "model.critic", "model.reference", "placement", "train.total_steps",
            "train.epochs_per_rollout", "train.critic_optimizer", "data.prompts_per_step")
TRAINING = ("train.global_batch_size", "train.micro_batch_size", "train.gradient_accumulation_steps",
            "train.forward_micro_batch_size", "train.micro_batch_tokens", "train.forward_micro_batch_tokens",
            "train.schedule", "train.recompute", "train.recompute_layers", "train.zero_stage",
            "train.reduce_bucket_mb", "train.reduce_dtype", "train.loss_scale", "train.loss_scale_window",
            "train.max_nonfinite_steps", "train.offload", "train.optimizer",
            "algorithm.loss_reduction", "algorithm.constant_length", "model.reward_model", "reward",
            "generation.reshard_bucket_mb", "generation.weights", "generation.reshard_check", "logging.wandb",
            "logging.tensorboard", "logging.samples", "logging.progress", "logging.trace_step",
            "evaluation.every_steps", "checkpoint", "sft")
NO_SPEC = Idle(_starts_from_a_folder, ("model.spec",), "has no effect where model.path is given",
               "remove one of the two")
UNREAD: dict[Command, tuple[Idle, ...]] = {
    Command.TRAIN: (Idle(_always, ("sft",), "has no effect in train", "remove it"),),
    Command.SFT: (
        Idle(_always, (*LEARNING, "generation.samples_per_prompt", "generation.temperature", "generation.top_k",
                       "generation.top_p", "generation.min_p", "generation.batch_invariant", "logging.samples"),
             "has no effect in sft, which learns from given answers and is evaluated greedily", "remove it"),
        Idle(lambda c: c.model.reward_model.path is None,
             ("train.forward_micro_batch_size", "train.forward_micro_batch_tokens"),
             "has no effect in sft without a reward model", "remove it"),
        Idle(_never_evaluated, ("reward", "model.reward_model"),
             "has no effect in sft without an evaluation", "give evaluation.every_steps"),
    ),
    Command.API: (
        Idle(_always, ("data.source", "data.test_tasks", "data.train_files", "data.test_files", "data.size",
                       "data.test_size", "data.prompts_per_step", "data.max_prompt_length", "data.overlong",
                       "data.prompt_template", "data.shuffle"),
             "has no effect with init_trainer, which is given its batches", "remove it"),
        Idle(_judged_otherwise, ("data.tasks",),
             "has no effect with init_trainer where other rewards than the tasks' own are given", "remove it"),
        Idle(_always, ("evaluation", "checkpoint", "logging.trace_step", "sft"),
             "has no effect with init_trainer, whose steps and exports are the caller's", "remove it"),
    ),
    Command.GENERATE: (
        Idle(_always, (*LEARNING, *TRAINING, "train.layout", "generation.layout.within_node", "data.shuffle"),
             "has no effect in generate", "remove it"),
        NO_SPEC,
    ),
    Command.COMPLETE: (
        Idle(_always, (*LEARNING, *TRAINING, "train.layout", "generation.layout.within_node", "data", "evaluation"),
             "has no effect in generate --prompts", "remove it"),
        NO_SPEC,
    ),
    Command.EXPORT: (
        Idle(_always, (*LEARNING, *TRAINING, "train.layout.sequence_parallel", "generation", "data",
                       "evaluation.prompts"), "has no effect in export", "remove it"),
        NO_SPEC,
    ),
}


def unread_keys(config: Config, command: Command) -> Iterator[Fault]:
    """A fault for each key that is set and that `command` does not read, each once."""
    seen: set[str] = set()
    for fault in faults_of(UNREAD[command], config):
        if fault.key not in seen:
            seen.add(fault.key)
            yield fault
