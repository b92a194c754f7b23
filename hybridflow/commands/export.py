"""`hybridflow export`: the model of a config as a Hugging Face folder, read and written through its layout.

Of use to change the dtype of a model, to cut a single file up, and to check that a layout reads and writes a model.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from hybridflow.commands.job import Job
from hybridflow.config.layouts import Role, role_layout
from hybridflow.config.schema import Config
from hybridflow.config.words import MixedPrecision
from hybridflow.engine.native import ForwardEngine
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.hf_export import export_hf, tokenizer_files
from hybridflow.parallel.mesh import Mesh
from hybridflow.parallel.world import World
from hybridflow.trainer.engine_options import DTYPES, engine_options, grid_of
from hybridflow.trainer.model_folders import require_weights


def prepare(config: Config) -> Job:
    """Read the model's shape and the names of its tensors.

    The job then copies model.path to logging.dir/export, read at train.layout; one process reads it whole, unless an
    override gives a layout (`config.check`).

    The tensors keep their dtype, unless train.mixed_precision is bf16, fp16 or fp64.

    Raises:
        ValueError: there is a model in that folder already, such as the one that a training run left.
    """
    folder = Path(config.logging.dir) / "export"
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} holds a model already; choose another logging.dir, or remove it")
    require_weights("model.path", config.model.path, Head.LANGUAGE_MODEL)
    return partial(_run, config, ModelConfig.from_hf_folder(config.model.path))


def _run(config: Config, model: ModelConfig) -> None:
    precision, folder = config.train.mixed_precision, Path(config.logging.dir) / "export"
    wanted = None if precision is MixedPrecision.NO else DTYPES[precision]
    with closing(World.from_env(config.train.timeout_s)) as world:
        written = role_layout(config, Role.ACTOR, world.size)
        options = engine_options(config, written, wanted or model.file_dtype or torch.float32)
        engine = ForwardEngine(model, Mesh(grid_of(written), world), Head.LANGUAGE_MODEL, options)
        engine.load(config.model.path, seed=0)
        export_hf(folder, model, engine.shard_map, engine.storages, world, tokenizer_files(config.model.path),
                  dtype=wanted)
        if world.rank == 0:
            print(f"Exported {config.model.path} to {folder}, read at tp {written.tp} x pp {written.pp}")
