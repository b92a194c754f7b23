"""A model and its tokenizer as a folder that transformers opens."""

from __future__ import annotations

from pathlib import Path

from hybridflow.data.tokenizer import Tokenizer
from hybridflow.engine.native import ForwardEngine
from hybridflow.models.hf_export import export_hf


def export_actor(folder: Path, engine: ForwardEngine, tokenizer: Tokenizer) -> None:
    """Write config.json, weights and tokenizer. Collective; each byte is written once."""
    world = engine.mesh.world
    if world.rank == 0:
        tokenizer.save(folder)
    with engine.on_device():
        export_hf(folder, engine.model, engine.shard_map, engine.storages, world)
