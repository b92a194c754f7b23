"""Keys that a command does not read, whatever the rest of the config: setting one is refused, or told.

Commands that train have files of their own. `generate` and `export` are given the file of a training run, and so may
`init_trainer` be: there the file may hold such keys, but an override or a dict that was written for the call may not
(`check` and `reading` see to that).
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config.command import Command
from hybridflow.config.faults import Fault
from hybridflow.config.idle import Idle, faults_of
from hybridflow.config.layouts import answers_held_out
from hybridflow.config.reward_schema import asks_task_scorers, reward_models
from hybridflow.config.schema import Config
from hybridflow.config.words import DataSource, PreferenceLoss


def _always(config: Config) -> bool:
    return True


def _never_evaluated(config: Config) -> bool:
    return config.evaluation.every_steps is None


def _starts_from_a_folder(config: Config) -> bool:
    return config.model.path is not None


def _judged_otherwise(config: Config) -> bool:
    """The scorers of the tasks are not asked."""
    return not asks_task_scorers(config.reward, config.model.reward_model)


def _without_reward_models(config: Config) -> bool:
    return not reward_models(config.reward, config.model.reward_model)


def _answers_nothing(config: Config) -> bool:
    """No held-out prompt is answered in preference training: never, or since nothing judges the answers."""
    return not answers_held_out(config, Command.DPO)


LEARNING = ("algorithm.name", "algorithm.advantage", "algorithm.policy_loss", "algorithm.gamma", "algorithm.lam",
            "algorithm.clip", "algorithm.value_clip", "algorithm.value_loss_coef", "algorithm.entropy_coef",
            "algorithm.kl", "algorithm.correction", "algorithm.normalise_advantages", "algorithm.grpo_std_normalise",
            "algorithm.overlong_buffer", "algorithm.resample_rounds", "algorithm.safe", "cost", "model.cost_model",
            "model.cost_critic", "model.critic", "model.reference", "placement",
            "train.total_steps",
            "train.epochs_per_rollout", "train.critic_optimizer", "data.prompts_per_step")
TRAINING = ("train.global_batch_size", "train.micro_batch_size", "train.gradient_accumulation_steps",
            "train.forward_micro_batch_size", "train.micro_batch_tokens", "train.forward_micro_batch_tokens",
            "train.schedule", "train.recompute", "train.recompute_layers", "train.zero_stage",
            "train.reduce_bucket_mb", "train.reduce_dtype", "train.loss_scale", "train.loss_scale_window",
            "train.max_nonfinite_steps", "train.offload", "train.optimizer",
            "algorithm.loss_reduction", "algorithm.constant_length",
            "generation.reshard_bucket_mb", "generation.weights", "generation.overlap",
            "generation.max_staleness", "generation.reshard_check", "logging.wandb", "logging.tensorboard",
            "logging.samples", "logging.progress", "logging.trace_step", "logging.verl_names",
            "evaluation.every_steps", "checkpoint", "sft", "preference", "data.shuffle_buffer")
SAMPLING = ("generation.samples_per_prompt", "generation.temperature", "generation.top_k", "generation.top_p",
            "generation.min_p")
ROLLING_OUT = (*SAMPLING, "generation.batch_invariant", "generation.overlap", "generation.max_staleness",
               "logging.samples", "tools")
REDUCTION = ("algorithm.loss_reduction", "algorithm.constant_length")
JUDGING = ("reward", "model.reward_model", "evaluation.samples_per_prompt", "evaluation.temperature",
           "evaluation.top_k", "evaluation.top_p", "evaluation.min_p", "evaluation.save_answers", "tools")
# Of generation all but max_new_tokens, which bounds the answers in the data too.
ANSWERING = ("generation.engine", "generation.layout", "generation.balance", "generation.min_new_tokens",
             "generation.repetition_penalty", "generation.stop", "generation.max_rows", "generation.max_step_tokens",
             "generation.kv_cache_mb", "generation.reshard_bucket_mb", "generation.weights", "generation.reshard_check")
# Of the data, what a prompt is made with wherever it comes from.
PROMPTS = ("data.source", "data.mixture", "data.tasks", "data.test_tasks", "data.train_files", "data.test_files",
           "data.size", "data.test_size", "data.prompts_per_step", "data.max_prompt_length", "data.overlong",
           "data.prompt_template", "data.shuffle", "data.streaming", "data.shuffle_buffer")
OF_DPO = ("preference.loss", "preference.label_smoothing", "preference.nll_coef", "preference.precompute_reference")
OF_KTO = ("preference.desirable_weight", "preference.undesirable_weight")
OF_REWARD_MODEL = ("preference.margin_key", "preference.centre_coef")
# What preference training has no use for: all of learning from rollouts but the reference.
NOT_PREFERENCE = (*(key for key in LEARNING if key != "model.reference"), *ROLLING_OUT, "sft")
IN_MEMORY = Idle(_always, ("data.mixture", "data.streaming", "data.shuffle_buffer"),
                 "has no effect in preference training, whose rows are of one source and held in memory", "remove it")
FROM_FILES = Idle(lambda c: c.data.source is not DataSource.REASONING_GYM, ("preference.rejected",),
                  "has no effect with rows from files", "remove it, or choose data.source reasoning_gym")
GIVEN_ANSWERS = "which learns from given answers and is evaluated as evaluation says"
UNANSWERED = "has no effect where no held-out prompt is answered"
NO_SPEC = Idle(_starts_from_a_folder, ("model.spec",), "has no effect where model.path is given",
               "remove one of the two")
UNREAD: dict[Command, tuple[Idle, ...]] = {
    Command.TRAIN: (Idle(_always, ("sft", "preference"), "has no effect in train", "remove it"),),
    Command.SFT: (
        Idle(_always, (*LEARNING, *ROLLING_OUT, "preference"), f"has no effect in sft, {GIVEN_ANSWERS}", "remove it"),
        Idle(_without_reward_models,
             ("train.forward_micro_batch_size", "train.forward_micro_batch_tokens"),
             "has no effect in sft without a reward model", "remove it"),
        Idle(_never_evaluated, ("reward", "model.reward_model"),
             "has no effect in sft without an evaluation", "give evaluation.every_steps"),
    ),
    Command.DPO: (
        Idle(_always, (*NOT_PREFERENCE, *OF_KTO, *OF_REWARD_MODEL), f"has no effect in dpo, {GIVEN_ANSWERS}",
             "remove it"),
        Idle(lambda c: c.preference.loss is PreferenceLoss.IPO, ("preference.label_smoothing",),
             "has no effect with ipo", "remove it, or choose preference.loss sigmoid"),
        IN_MEMORY,
        FROM_FILES,
        Idle(lambda c: c.preference.nll_coef == 0, REDUCTION, "has no effect in dpo, whose loss is a mean over pairs",
             "remove it, or give preference.nll_coef"),
        Idle(_answers_nothing, (*ANSWERING, *JUDGING), UNANSWERED,
             "give evaluation.every_steps, and what judges answers to prompts from files"),
    ),
    Command.KTO: (
        Idle(_always, (*NOT_PREFERENCE, *OF_DPO, *OF_REWARD_MODEL), f"has no effect in kto, {GIVEN_ANSWERS}",
             "remove it"),
        IN_MEMORY,
        FROM_FILES,
        Idle(_always, REDUCTION, "has no effect in kto, whose loss is a mean over answers", "remove it"),
        Idle(_answers_nothing, (*ANSWERING, *JUDGING), UNANSWERED,
             "give evaluation.every_steps, and what judges answers to prompts from files"),
    ),
    Command.REWARD_MODEL: (
        Idle(_always, (*NOT_PREFERENCE, "model.reference", *OF_DPO, *OF_KTO, "preference.beta", *REDUCTION, *ANSWERING,
                       *JUDGING), "has no effect in reward_model, which scores given answers", "remove it"),
        IN_MEMORY,
        FROM_FILES,
        Idle(lambda c: c.data.source is DataSource.REASONING_GYM, ("preference.margin_key",),
             "has no effect with reasoning_gym, whose pairs have no margin", "choose data.source jsonl or parquet"),
    ),
    Command.API: (
        Idle(_always, tuple(key for key in PROMPTS if key != "data.tasks"),
             "has no effect with init_trainer, which is given its batches", "remove it"),
        Idle(_judged_otherwise, ("data.tasks",),
             "has no effect with init_trainer where other rewards than the tasks' own are given", "remove it"),
        Idle(_always, ("evaluation", "checkpoint", "logging.trace_step", "sft", "preference"),
             "has no effect with init_trainer, whose steps and exports are the caller's", "remove it"),
    ),
    Command.GENERATE: (
        Idle(_always, (*LEARNING, *TRAINING, *JUDGING, "train.layout", "generation.layout.within_node",
                       "data.shuffle"), "has no effect in generate", "remove it"),
        NO_SPEC,
    ),
    Command.EVALUATE: (
        Idle(_always, (*LEARNING, *(key for key in TRAINING if "forward" not in key), *SAMPLING,
                       "generation.layout.within_node", "data.shuffle"),
             "has no effect in evaluate", "remove it"),
        Idle(_without_reward_models,
             ("train.layout", "train.forward_micro_batch_size", "train.forward_micro_batch_tokens"),
             "has no effect in evaluate without a reward model", "remove it"),
        NO_SPEC,
    ),
    Command.COMPLETE: (
        Idle(_always, (*LEARNING, *TRAINING, *JUDGING, *PROMPTS, "train.layout", "generation.layout.within_node",
                       "evaluation"),
             "has no effect in generate --prompts", "remove it"),
        NO_SPEC,
    ),
    Command.EXPORT: (
        Idle(_always, (*LEARNING, *TRAINING, *JUDGING, "train.layout.sequence_parallel", "generation", "data",
                       "evaluation.prompts"), "has no effect in export", "remove it"),
        NO_SPEC,
    ),
}


def unread_keys(config: Config, command: Command) -> Iterator[Fault]:
    """A fault for each key that is set and that `command` does not read, each once."""
    yield from faults_of(UNREAD[command], config)
