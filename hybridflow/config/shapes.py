"""Whether the models of a config can be cut in its layouts, read each other's tokens and hold its longest sequences.

The rules are `models.layout`'s; they are imported when called, since they bring torch along. So this is asked last,
of a config that has no other fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.config.command import Command
from hybridflow.config.faults import Fault
from hybridflow.config.layout_rules import recompute_faults
from hybridflow.config.layouts import (
    LEARNING,
    Role,
    generation_layout,
    layout_key,
    role_layout,
    roles,
    used_roles,
    written_layout,
)
from hybridflow.config.model_schema import LayoutConfig, ModelSpec
from hybridflow.config.reward_rules import is_decoder_folder, reward_model_faults
from hybridflow.config.reward_schema import reward_models
from hybridflow.config.schema import Config

if TYPE_CHECKING:
    from hybridflow.models.config import ModelConfig

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")
LARGE_VOCABULARY = 1 << 20  # stands for a size that only the tokenizer knows


def shape_faults(config: Config, world_size: int, command: Command) -> list[Fault]:
    """A fault for each model whose folder cannot be read, that is too small for its prompts and responses, or that
    does not fit its layout.
    """
    faults: list[Fault] = []
    starts: list[Start] = []
    for role, key, path in _starts(config, command):
        try:
            starts.append(Start(role, key, path, _decoder(path, config.model.spec)))
        except ValueError as error:
            faults.append(Fault(key, path, str(error)))
    actor = next((start.model for start in starts if start.role is Role.ACTOR), None)
    for start in starts:
        faults += _layout_faults(config, world_size, command, start)
        if start.role is Role.REWARD and has_tokenizer(start.path):
            continue  # it may read the text in tokens of its own, fewer or more of them
        faults += _length_faults(config, command, start)
        if actor is not None:
            faults += _vocabulary_faults(start, actor)
    if command.scores:
        faults += reward_model_faults(config)
    if actor is not None and command in (Command.TRAIN, Command.API):
        faults += _invariance_faults(config, actor)
    learning = {start.role: start.model.num_layers for start in starts if start.role in LEARNING}
    if not faults and command.trains:
        faults += recompute_faults(config, learning)
    return list({str(fault): fault for fault in faults}.values())  # roles share folders and layouts


@dataclass(frozen=True)
class Start:
    """A model of a role, the folder that its weights come from (None: model.spec), and the key that says so."""

    role: Role
    key: str
    path: str | None
    model: ModelConfig


def _layout_faults(config: Config, world_size: int, command: Command, start: Start) -> Iterator[Fault]:
    layouts, role = {}, start.role
    if not command.answers:
        layouts[layout_key(config, role)] = role_layout(config, role, world_size)
    if role is Role.ACTOR and command is not Command.EXPORT:
        layouts["generation.layout"] = generation_layout(config, world_size)
    for place, layout in layouts.items():
        for reason in _misfits(start.model, layout):
            yield Fault(place, _degrees(layout), f"{start.key}: {reason}")


def _length_faults(config: Config, command: Command, start: Start) -> Iterator[Fault]:
    """Positions for the longest prompt and response; for a response alone where prompts are the caller's."""
    parts = {"data.max_prompt_length": config.data.max_prompt_length,
             "generation.max_new_tokens": config.generation.max_new_tokens}
    if command in (Command.API, Command.COMPLETE):
        parts.pop("data.max_prompt_length")
    longest, key, path, model = sum(parts.values()), start.key, start.path, start.model
    if command is Command.EXPORT or longest <= model.max_position_embeddings:
        return
    rule = f"is below {' + '.join(f'{name} {length}' for name, length in parts.items())}"
    if path is None:
        yield Fault(f"{key}.max_position_embeddings", model.max_position_embeddings, rule, f"choose {longest} or more")
    else:
        yield Fault(key, path, f"its max_position_embeddings {model.max_position_embeddings} {rule}",
                    f"choose {'lower ones' if len(parts) > 1 else 'a lower one'}")


def _vocabulary_faults(start: Start, actor: ModelConfig) -> Iterator[Fault]:
    """Critic and reward model read what the actor says."""
    if start.model.vocab_size < actor.vocab_size != LARGE_VOCABULARY:
        yield Fault(start.key, start.path, f"its vocabulary of {start.model.vocab_size} is smaller than the actor's of "
                    f"{actor.vocab_size}, whose tokens it has to read", "choose a model with the actor's tokenizer")


def _invariance_faults(config: Config, actor: ModelConfig) -> Iterator[Fault]:
    """Training and generation add the parts of a sum over tensor ranks in the same tree, or at the same tp."""
    from hybridflow.models.layout import sum_segments

    if not config.generation.batch_invariant:
        return
    generating, parts = config.generation.layout.tp, sum_segments(actor)
    agreeing = {layout_key(config, role): written_layout(config, role).tp
                for role in (Role.ACTOR, Role.REFERENCE) if role in roles(config)}
    for key, tp in agreeing.items():
        if tp != generating and (parts % tp or parts % generating):
            rule = f"sums over tensor ranks have the bits of generation.layout.tp {generating} only where both divide"
            yield Fault(f"{key}.tp", tp, f"{rule} {parts} (generation.batch_invariant)", f"choose tp {generating}")


def spec_decoder(spec: ModelSpec, vocab_size: int) -> ModelConfig:
    """The decoder that a spec describes. `vocab_size` is the tokenizer's, used where the spec names none."""
    from hybridflow.models.config import Family, ModelConfig
    from hybridflow.models.rope import RopeConfig

    family = Family(spec.family.value)
    return ModelConfig(
        family=family,
        vocab_size=spec.vocab_size or vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads or spec.num_heads,
        head_dim=spec.head_dim or spec.hidden_size // spec.num_heads,
        rope=replace(RopeConfig(), theta=spec.rope_theta),
        tie_word_embeddings=spec.tie_word_embeddings,
        qkv_bias=family is Family.QWEN2,
        qk_norm=family is Family.QWEN3,
        max_position_embeddings=spec.max_position_embeddings,
    )


def _starts(config: Config, command: Command) -> Iterator[tuple[Role, str, str | None]]:
    """The key and the folder that each role's weights come from; the actor's where it has none of its own. Reward
    models that are no decoders of ours are left out: they have no layout.
    """
    models = reward_models(config.reward, config.model.reward_model)
    for role in used_roles(config, command):
        if role is Role.REWARD:
            yield from ((role, key, path) for key, path in models.items() if is_decoder_folder(path))
        elif role is Role.CRITIC and config.model.critic.path is not None:
            yield role, "model.critic.path", config.model.critic.path
        elif role is Role.COST_CRITIC and config.model.cost_critic.path is not None:
            yield role, "model.cost_critic.path", config.model.cost_critic.path
        elif role is Role.COST:
            yield role, "model.cost_model.path", config.model.cost_model.path
        elif config.model.path is None:
            yield role, "model.spec", None
        else:
            yield role, "model.path", config.model.path


def has_tokenizer(path: str | None) -> bool:
    """Whether a model's folder has a tokenizer of its own."""
    return path is not None and any(Path(path, name).is_file() for name in TOKENIZER_FILES)


def _decoder(path: str | None, spec: ModelSpec | None) -> ModelConfig:
    from hybridflow.models.config import ModelConfig

    if path is not None:
        return ModelConfig.from_hf_folder(path)
    assert spec is not None, "validate has seen to model.path or model.spec"
    return spec_decoder(spec, LARGE_VOCABULARY)


def _misfits(model: ModelConfig, layout: LayoutConfig) -> list[str]:
    from hybridflow.models.layout import check_layout
    from hybridflow.parallel.mesh import Layout
    from hybridflow.parallel.schedules.chunks import Chunks

    assert layout.dp is not None
    return check_layout(model, Layout(layout.tp, layout.pp, layout.dp, layout.cp), layout.layers_per_stage,
                        Chunks(layout.pp, layout.vpp))


def _degrees(layout: LayoutConfig) -> str:
    return f"tp {layout.tp} pp {layout.pp} dp {layout.dp}"
