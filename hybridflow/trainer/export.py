"""A model and its tokenizer as a folder that transformers opens."""

from __future__ import annotations

from pathlib import Path

from hybridflow.data.tokenizer import Tokenizer
from hybridflow.engine.native import ForwardEngine
from hybridflow.models.config import Head
from hybridflow.models.hf_export import export_hf


def export_actor(folder: Path, engine: ForwardEngine, tokenizer: Tokenizer) -> None:
    """Write config.json, weights and tokenizer. Collective; each byte is written once. A score head makes it a sequence
    classifier with one label.
    """
    world = engine.mesh.world
    if world.rank == 0:
        tokenizer.save(folder)
    with engine.on_device():
        model = engine.model.as_classifier() if engine.head is Head.SCORE else engine.model
        export_hf(folder, model, engine.shard_map, engine.storages, world)
