"""A model and its tokenizer as a folder that transformers opens."""

from __future__ import annotations

from pathlib import Path

from hybridflow.data.tokenizer import Tokenizer
from hybridflow.models.config import Head
from hybridflow.models.hf_export import export_hf
from hybridflow.trainer.roles import ScoringRole


def export_role(folder: Path, role: ScoringRole, tokenizer: Tokenizer) -> None:
    """Write config.json, weights and tokenizer. Collective over the world; each byte is written once. A score head
    makes it a sequence classifier with one label.
    """
    if role.world.rank == 0:
        tokenizer.save(folder)
    blueprint = role.blueprint
    model = blueprint.model.as_classifier() if blueprint.head is Head.SCORE else blueprint.model
    with role.turn():
        storages = {} if role.engine is None else role.engine.storages
        export_hf(folder, model, blueprint.shard_map, storages, role.world, kept_dtype=blueprint.options.dtype)
