"""Whether the models of a config can be cut in its layouts.

The rules are `models.layout`'s; they are imported when called, since they bring torch along. So this is asked last,
of a config that has no other fault.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hybridflow.config.faults import Fault
from hybridflow.config.layouts import Role, generation_layout, layout_key, role_layout, roles
from hybridflow.config.model_schema import LayoutConfig, ModelSpec
from hybridflow.config.schema import Config
from hybridflow.config.validate import Command

if TYPE_CHECKING:
    from hybridflow.models.config import ModelConfig

LARGE_VOCABULARY = 1 << 20  # stands for a size that only the tokenizer knows


def shape_faults(config: Config, world_size: int, command: Command) -> list[Fault]:
    """A fault for each model whose folder cannot be read, and for each reason why a model does not fit its layout."""
    trains = command in (Command.TRAIN, Command.API)
    used = roles(config) if trains else (Role.ACTOR,)
    faults: dict[str, Fault] = {}
    for role in used:
        key, path = _start(config, role)
        try:
            model = _decoder(path, config.model.spec)
        except ValueError as error:
            faults.setdefault(key, Fault(key, path, str(error)))
            continue
        layouts = {layout_key(config, role): role_layout(config, role, world_size)}
        if role is Role.ACTOR:
            layouts["generation.layout"] = generation_layout(config, world_size)
        for place, layout in layouts.items():
            for reason in _misfits(model, layout):
                faults.setdefault(f"{place} {reason}", Fault(place, _degrees(layout), f"{key}: {reason}"))
    return list(faults.values())


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


def _start(config: Config, role: Role) -> tuple[str, str | None]:
    """The key and the folder that a role's weights come from; the actor's where it has none of its own."""
    if role is Role.CRITIC and config.model.critic.path is not None:
        return "model.critic.path", config.model.critic.path
    if role is Role.REWARD:
        return "model.reward_model.path", config.model.reward_model.path
    return ("model.spec", None) if config.model.path is None else ("model.path", config.model.path)


def _decoder(path: str | None, spec: ModelSpec | None) -> ModelConfig:
    from hybridflow.models.config import ModelConfig

    if path is not None:
        return ModelConfig.from_hf_folder(path)
    assert spec is not None, "validate has seen to model.path or model.spec"
    return spec_decoder(spec, LARGE_VOCABULARY)


def _misfits(model: ModelConfig, layout: LayoutConfig) -> list[str]:
    from hybridflow.models.layout import check_layout
    from hybridflow.parallel.mesh import Layout

    assert layout.dp is not None
    return check_layout(model, Layout(layout.tp, layout.pp, layout.dp), layout.layers_per_stage)


def _degrees(layout: LayoutConfig) -> str:
    return f"tp {layout.tp} pp {layout.pp} dp {layout.dp}"
