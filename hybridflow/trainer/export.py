"""A model and its tokenizer as a folder that transformers opens."""

from __future__ import annotations

from pathlib import Path

from hybridflow.data.tokenizer import Tokenizer
from hybridflow.models.hf_export import export_hf
from hybridflow.trainer.roles import ScoringRole


def export_role(folder: Path, role: ScoringRole, tokenizer: Tokenizer) -> None:
    """Write config.json, weights and tokenizer. Collective over the world; each byte is written once."""
    if role.world.rank == 0:
        tokenizer.save(folder)
    blueprint = role.blueprint
    with role.turn():
        storages = {} if role.engine is None else role.engine.storages
        export_hf(folder, blueprint.model, blueprint.shard_map, storages, role.world,
                  kept_dtype=blueprint.options.dtype)
