"""What the values of a config must be to each other and to the number of ranks. Looks at no device, and at no file
but for the kinds of reward models.

`validate` returns every fault it finds and raises nothing. What one value may be by itself is in `bounds`, layouts are
`layout_rules`', data and evaluation `data_rules`', keys that do nothing are in `idle` and `unread`; whether a model's
shape fits a layout is `shapes`', whether files exist is `files`'.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.algorithms.registry import POLICY_LOSSES, Need
from hybridflow.config.batch_math import BatchMath, counted, trained_at_once
from hybridflow.config.bounds import out_of_bounds
from hybridflow.config.command import Command
from hybridflow.config.data_rules import data_faults, evaluation_faults
from hybridflow.config.data_schema import holds_out
from hybridflow.config.faults import Fault, listed, nearest_key
from hybridflow.config.idle import idle_keys
from hybridflow.config.layout_rules import layout_faults, recompute_faults
from hybridflow.config.layouts import (
    LEARNING,
    Role,
    divisors,
    layout_key,
    token_multiple,
    used_roles,
    written_layout,
)
from hybridflow.config.model_schema import ModelSpec
from hybridflow.config.placement_rules import placement_faults
from hybridflow.config.recipe import choices_of_advantage, needs_of, resample_rounds_of
from hybridflow.config.reward_rules import reward_faults
from hybridflow.config.schema import Config
from hybridflow.config.tool_rules import tool_faults
from hybridflow.config.unread import unread_keys
from hybridflow.config.words import (
    Decay,
    EngineName,
    GenerationBalance,
    GenerationWeights,
    MixedPrecision,
    Overlap,
    ReduceDtype,
)
from hybridflow.parallel.arithmetic import round_up
from hybridflow.tools.detect import BUILT_IN


def validate(config: Config, world_size: int, command: Command = Command.TRAIN) -> list[Fault]:
    """Every fault of `config` for `command` on `world_size` ranks; empty if there is none.

    GENERATE, COMPLETE and EXPORT are mostly given the file of a training run, so that keys without effect are no fault
    there.
    """
    wrong, uncut = list(out_of_bounds(config)), list(layout_faults(config, world_size, command))
    faults = [*wrong, *_models(config, command), *uncut]
    if command in (Command.TRAIN, Command.API):
        faults += [*placement_faults(config, world_size), *_overlap(config, command)]
    if command.trains and not wrong:  # the batch numbers divide by these
        faults += _batches(config, command, None if uncut else world_size)
        faults += [] if uncut else _recompute(config, command)
    if command in (Command.TRAIN, Command.API):
        faults += _algorithm(config)
    if command.trains:
        unread = list(unread_keys(config, command))
        known = {fault.key for fault in unread}
        faults += [*unread, *(fault for fault in idle_keys(config, command) if fault.key not in known)]
        faults += [*_schedule(config, command), *_precision(config), *_memory(config)]
    if command in (Command.TRAIN, Command.API, Command.EVALUATE):
        faults += [*tool_faults(config), *_function("tools.call", config.tools.call, tuple(BUILT_IN))]
    if command.scores:
        faults += reward_faults(config)
    if command is not Command.EXPORT:
        faults += [*_generation(config), *_invariance(config, command), *_vllm(config, command)]
    if command not in (Command.API, Command.COMPLETE, Command.EXPORT):
        faults += [*data_faults(config, command), *evaluation_faults(config, command, world_size)]
    return faults


def _models(config: Config, command: Command) -> Iterator[Fault]:
    model, asked = config.model, command.answers or command is Command.EXPORT
    if model.path is None and model.spec is None:
        yield Fault("model.path", None, "no model is named",
                    "give a Hugging Face folder here, or the shape of a new model in model.spec")
    if model.path is not None and model.spec is not None and not asked:  # there it may have been the run's own start
        yield Fault("model.spec", "{...}", "has no effect where model.path is given", "remove one of the two")
    if model.path is None and model.tokenizer is None and command is not Command.EXPORT:
        yield Fault("model.tokenizer", None, "a new model brings no tokenizer",
                    "give a sentencepiece .model file or a Hugging Face folder")
    if asked and model.path is None:
        verb = "export" if command is Command.EXPORT else "generate"
        yield Fault("model.path", None, f"there is nothing to {verb}", "give the folder of a trained model")
    if model.spec is not None and not (asked and model.path is not None):
        yield from _spec(model.spec)


def _spec(spec: ModelSpec) -> Iterator[Fault]:
    counts = {"vocab_size": spec.vocab_size, "hidden_size": spec.hidden_size, "num_layers": spec.num_layers,
              "intermediate_size": spec.intermediate_size, "num_heads": spec.num_heads, "head_dim": spec.head_dim,
              "num_kv_heads": spec.num_kv_heads, "max_position_embeddings": spec.max_position_embeddings}
    wrong = [Fault(f"model.spec.{name}", count, "must be at least 1", "choose 1 or more")
             for name, count in counts.items() if count is not None and count < 1]
    yield from wrong
    if wrong:
        return
    if spec.head_dim is None and spec.hidden_size % spec.num_heads:
        yield Fault("model.spec.num_heads", spec.num_heads, f"does not divide hidden_size {spec.hidden_size}",
                    f"choose {listed(_below(spec.hidden_size, spec.num_heads))}, or give head_dim")
    elif (width := spec.head_dim or spec.hidden_size // spec.num_heads) % 2:
        yield Fault("model.spec.head_dim", width, "is odd, and rotary positions turn pairs of numbers",
                    "choose an even head_dim")
    if spec.num_kv_heads is not None and spec.num_heads % spec.num_kv_heads:
        yield Fault("model.spec.num_kv_heads", spec.num_kv_heads, f"does not divide num_heads {spec.num_heads}",
                    f"choose {listed(divisors(spec.num_heads))}")
    if spec.rope_theta <= 0:
        yield Fault("model.spec.rope_theta", spec.rope_theta, "must be above 0", "choose e.g. 10000.0")


def _below(number: int, near: int) -> list[int]:
    """The divisors of `number` on both sides of `near`."""
    all_of_it = divisors(number)
    return [d for d in all_of_it if d < near][-1:] + [d for d in all_of_it if d > near][:1]


def _batches(config: Config, command: Command, world_size: int | None) -> Iterator[Fault]:
    """`world_size` is None where it cannot be cut in the layouts: then rows are judged without their padding."""
    train, samples = config.train, config.generation.samples_per_prompt
    if world_size is not None:
        yield from _accumulation(config, BatchMath.of(config, world_size).dp)
    rollouts = config.data.prompts_per_step * samples
    if command is Command.KTO and train.global_batch_size == 1:
        yield Fault("train.global_batch_size", 1, "kto compares each answer with those to other prompts of its batch",
                    "choose 2 or more")
    preference = config.preference
    if command is Command.KTO and not preference.desirable_weight and not preference.undesirable_weight:
        yield Fault("preference.desirable_weight", 0, "is 0 as preference.undesirable_weight is, so that nothing is "
                    "learned from", "choose e.g. 1.0 for one of them")
    if command is Command.TRAIN and train.global_batch_size > rollouts:
        yield Fault("train.global_batch_size", train.global_batch_size,
                    f"a step has only {counted(config.data.prompts_per_step, 'prompt')} x "
                    f"{counted(samples, 'sample')} = {counted(rollouts, 'rollout')}", f"choose {rollouts} or less")
    used = used_roles(config, command)
    for key, tokens, roles in (
        ("train.micro_batch_tokens", train.micro_batch_tokens, [role for role in used if role in LEARNING]),
        ("train.forward_micro_batch_tokens", train.forward_micro_batch_tokens, used),
    ):
        layouts = [] if world_size is None else [written_layout(config, role) for role in roles]
        if tokens is not None:
            rows = 2 if command.has_pairs and key == "train.micro_batch_tokens" else 1
            yield from _budget(key, tokens, config, max(map(token_multiple, layouts), default=1), command, rows)


def _recompute(config: Config, command: Command) -> Iterator[Fault]:
    """Of new models; those in folders are `shapes`' to look at."""
    model, learning = config.model, [role for role in used_roles(config, command) if role in LEARNING]
    if model.path is None and model.spec is not None and (model.critic.path is None or Role.CRITIC not in learning):
        yield from recompute_faults(config, dict.fromkeys(learning, model.spec.num_layers))


def _accumulation(config: Config, dp: int) -> Iterator[Fault]:
    train, steps, rows = config.train, config.train.gradient_accumulation_steps, trained_at_once(config).rows
    if rows is None or steps is None or rows * steps * dp == train.global_batch_size:
        return
    product = rows * steps * dp
    exact, rest = divmod(train.global_batch_size, rows * dp)
    choice = f"choose gradient_accumulation_steps {exact}, or null" if not rest else "choose null"
    yield Fault("train.gradient_accumulation_steps", steps,
                f"micro_batch_size {rows} x {steps} x dp {dp} = {product}, but "
                f"global_batch_size is {train.global_batch_size}", f"{choice}, or global_batch_size {product}")


def _budget(key: str, tokens: int, config: Config, multiple: int, command: Command, rows: int) -> Iterator[Fault]:
    """The longest row, or pair of `rows` 2, fits in a micro-batch of `tokens`; with init_trainer a response and one
    token of its prompt.
    """
    longest = config.generation.max_new_tokens
    longest += 1 if command is Command.API else config.data.max_prompt_length
    prompt = "a prompt of 1" if command is Command.API else f"data.max_prompt_length {config.data.max_prompt_length}"
    needed = round_up(longest * rows, multiple)
    if tokens < needed:
        padded = f", padded to {needed} in its layout" if needed > longest * rows else ""
        of_pair = f", which is {longest * rows} for a pair" if rows > 1 else ""
        yield Fault(key, tokens, f"cannot hold the longest {command.unit if rows > 1 else 'row'}, {prompt} + "
                    f"generation.max_new_tokens {config.generation.max_new_tokens} = {longest} tokens{of_pair}{padded}",
                    f"choose {needed} or more")


def _algorithm(config: Config) -> Iterator[Fault]:
    algorithm = config.algorithm
    if config.generation.temperature == 0:
        yield Fault("generation.temperature", 0, "greedy samples have no log-probs to train on", "choose e.g. 1.0")
    yield from _function("algorithm.advantage", algorithm.advantage, choices_of_advantage(algorithm))
    yield from _function("algorithm.policy_loss", algorithm.policy_loss, tuple(POLICY_LOSSES))
    if Need.GROUP in needs_of(algorithm) and config.generation.samples_per_prompt == 1:
        who = algorithm.advantage or algorithm.name.value
        yield Fault("generation.samples_per_prompt", 1, f"{who} compares the samples of a prompt with each other",
                    "choose 2 or more")
    yield from _resampling(config)
    if Need.COST in needs_of(algorithm) and config.cost.function is None and config.model.cost_model.path is None:
        yield Fault("cost.function", None, f"{algorithm.name.value} needs the cost of each response",
                    "give file.py:function, or model.cost_model.path")
    buffer, longest = algorithm.overlong_buffer, config.generation.max_new_tokens
    if buffer is not None and buffer > longest:
        yield Fault("algorithm.overlong_buffer", buffer, f"is above generation.max_new_tokens {longest}",
                    f"choose {longest} or less")
    if algorithm.kl.target is not None and algorithm.kl.coef == 0:
        yield Fault("algorithm.kl.coef", 0, "a coefficient that starts at 0 cannot be steered to algorithm.kl.target",
                    "choose e.g. 0.01")


def _resampling(config: Config) -> Iterator[Fault]:
    """What asks for more answers once some are scored."""
    algorithm, overlap = config.algorithm, config.generation.overlap
    rounds, greedy = resample_rounds_of(algorithm), Need.GREEDY_ANSWER in needs_of(algorithm)
    if rounds and config.generation.samples_per_prompt == 1:
        yield Fault("algorithm.resample_rounds", rounds, "the rewards of a single sample never differ",
                    "choose 0, or generation.samples_per_prompt 2 or more")
    if rounds and greedy:
        yield Fault("algorithm.resample_rounds", rounds, f"{algorithm.name.value} replaces no prompts", "choose 0")
    if overlap is not Overlap.NONE and (rounds or greedy):
        yield Fault("generation.overlap", overlap.value, f"{algorithm.name.value} generates and scores in turn",
                    "choose none" + (", or algorithm.resample_rounds 0" if rounds else ""))


def _function(key: str, spec: str | None, known: tuple[str, ...]) -> Iterator[Fault]:
    """A name of a table or file.py:function; whether the file is right is looked at where the run starts."""
    if spec is None or spec in known or (":" in spec and spec.rpartition(":")[0].endswith(".py")):
        return
    near = nearest_key(spec.lower(), known, ())
    yield Fault(key, spec, "is neither a name of the table nor file.py:function",
                f"did you mean {near}? It may be {listed(known)}" if near else f"choose {listed(known)}")


def _generation(config: Config) -> Iterator[Fault]:
    shortest, longest = config.generation.min_new_tokens, config.generation.max_new_tokens
    if shortest > longest:
        yield Fault("generation.min_new_tokens", shortest, f"is above generation.max_new_tokens {longest}",
                    f"choose {longest} or less")
    if "" in config.generation.stop:
        yield Fault("generation.stop", config.generation.stop, "an empty string stands everywhere", "remove it")


def _overlap(config: Config, command: Command) -> Iterator[Fault]:
    if command is Command.API and config.algorithm.safe.pretrain_coef:
        yield Fault("algorithm.safe.pretrain_coef", config.algorithm.safe.pretrain_coef,
                    "wants right answers of training data, and init_trainer is given prompts", "choose 0")
    if command is Command.API and config.generation.overlap is not Overlap.NONE:
        yield Fault("generation.overlap", config.generation.overlap.value,
                    "wants the prompts of the next step, and init_trainer is given one batch at a time", "choose none")
    partial = config.generation.overlap is Overlap.PARTIAL
    if partial and config.generation.balance is GenerationBalance.SHARED:
        yield Fault("generation.balance", "shared", "partial rollouts stay with the replica that has begun them",
                    "choose own, or generation.overlap none or one_step_off")
    if partial and config.generation.max_staleness > config.train.total_steps:
        yield Fault("generation.max_staleness", config.generation.max_staleness,
                    "batches begun ahead of more steps than the run has", f"choose {config.train.total_steps} or less")


def _invariance(config: Config, command: Command) -> Iterator[Fault]:
    """What the same bits in training and generation ask of both; the device is looked at where the run starts."""
    if not config.generation.batch_invariant or command.is_offline:
        return
    otherwise = "or generation.batch_invariant false"
    if config.train.mixed_precision is MixedPrecision.FP16:
        yield Fault("train.mixed_precision", "fp16", "has no batch-invariant arithmetic",
                    f"choose no, bf16 or fp64, {otherwise}")
    if command.answers:
        return
    if config.generation.weights is GenerationWeights.SHARED:
        yield Fault("generation.weights", "shared", "are not laid out as batch-invariant generation reads them",
                    f"choose packed or null, {otherwise}")
    agreeing = [role for role in used_roles(config, command) if role in (Role.ACTOR, Role.REFERENCE)]
    for key, cp in {layout_key(config, role): written_layout(config, role).cp for role in agreeing}.items():
        if cp > 1:
            yield Fault(f"{key}.cp", cp, "cuts rows, and attention over parts of rows is not batch-invariant",
                        f"choose cp 1, {otherwise}")


def _vllm(config: Config, command: Command) -> Iterator[Fault]:
    """What an engine of others cannot do; whether it is installed is looked at where the run starts."""
    generation, otherwise = config.generation, "or generation.engine own"
    if generation.engine is not EngineName.VLLM:
        return
    for name, degree in (("tp", generation.layout.tp), ("pp", generation.layout.pp)):
        if degree > 1:
            yield Fault(f"generation.layout.{name}", degree, "vllm generates with a whole model on each rank",
                        f"choose {name} 1, {otherwise}")
    if generation.balance is GenerationBalance.SHARED:
        yield Fault("generation.balance", "shared", "vllm is given all of a replica's prompts at once",
                    f"choose own, {otherwise}")
    if generation.batch_invariant and not command.is_offline:
        yield Fault("generation.batch_invariant", True, "vllm has other kernels than training",
                    f"choose false, {otherwise}")
    if generation.weights is GenerationWeights.SHARED and not command.answers:
        yield Fault("generation.weights", "shared", "vllm lays weights out in memory of its own",
                    f"choose packed or null, {otherwise}")
    if config.train.mixed_precision is MixedPrecision.FP64:
        yield Fault("train.mixed_precision", "fp64", "vllm does not compute in it",
                    f"choose no, bf16 or fp16, {otherwise}")


def _schedule(config: Config, command: Command) -> Iterator[Fault]:
    if command is Command.API:
        yield from _decay(config)
    accuracy = config.sft.stop_at_accuracy
    if accuracy is not None and (config.evaluation.every_steps is None or not holds_out(config.data)):
        yield Fault("sft.stop_at_accuracy", accuracy, "the accuracy is never measured",
                    "give evaluation.every_steps and held-out prompts, or choose null")
    if not config.logging.dir:
        yield Fault("logging.dir", config.logging.dir, "a run needs a folder", "choose e.g. runs/default")


def _decay(config: Config) -> Iterator[Fault]:
    """A decaying rate must know the last optimizer step; how many a step has depends on the batches."""
    train = config.train
    for key, decay in (("train.optimizer.decay", train.optimizer.decay),
                       ("train.critic_optimizer.decay", train.critic_optimizer.decay)):
        if decay not in (None, Decay.CONSTANT):
            yield Fault(key, decay.value, "init_trainer is given its batches, so that the number of optimizer steps is "
                        "not known", "choose constant")


def _precision(config: Config) -> Iterator[Fault]:
    train = config.train
    if train.mixed_precision is MixedPrecision.FP64 and train.reduce_dtype is ReduceDtype.BF16:
        yield Fault("train.reduce_dtype", "bf16", "would round the gradients of fp64 training to 8 bits",
                    "choose fp32 (as they are accumulated), or another train.mixed_precision")


def _memory(config: Config) -> Iterator[Fault]:
    if config.train.offload.roles and config.generation.weights is GenerationWeights.SHARED:
        yield Fault("generation.weights", "shared", "generates with the training weights, which train.offload.roles "
                    "puts away meanwhile", "choose packed or null, or train.offload.roles false")
