"""Reads a Hugging Face folder into the storages of one rank: only this rank's boxes, piece by piece.

Owns what a file must and may contain. Where boxes lie is the shard map's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hybridflow.models.init import head_std, init_shard
from hybridflow.models.safetensors_files import read_header, tensor_files
from hybridflow.models.weights import LM_HEAD, SCORE_HEAD, VALUE_HEAD
from hybridflow.parallel.box import Shard
from hybridflow.parallel.shard_map import ShardMap

PIECE_NUMEL = 1 << 24  # at most this many numbers are read at once
HEADS = (LM_HEAD, VALUE_HEAD, SCORE_HEAD)
# Heads that may be missing: of a model that answers, and of one that learns.
FRESH, FRESH_IN_TRAINING = (VALUE_HEAD,), (VALUE_HEAD, SCORE_HEAD)


@torch.no_grad()
def load_hf(path: str | Path, storages: dict[str, Tensor], shard_map: ShardMap, rank: int, seed: int = 0,
            fresh: Sequence[str] = FRESH) -> None:
    """Fill every storage of `rank` from the safetensors files of `path`, cast to the storages' dtype.

    Heads of another kind in the files are left out. A head among `fresh` that they lack starts from `seed`, the same in
    every layout.

    Raises:
        ValueError: tensors that are missing, unknown or of another shape (all are listed), or no such files.
    """
    folder = Path(path)
    files = require_tensors(folder, shard_map.shapes, fresh)
    missing = [name for name in fresh if name in shard_map.shapes and name not in files]
    by_file: dict[Path, list[Shard]] = defaultdict(list)
    for shard in shard_map.shards(rank):
        if shard.box.name in missing:
            shape = shard_map.shapes[shard.box.name]
            init_shard(storages, shard, shape, seed, head_std(shape[1]))
        else:
            by_file[files[shard.box.name]].append(shard)
    for file, shards in by_file.items():
        with safe_open(str(file), framework="pt") as tensors:
            for shard in shards:
                _read(tensors, shard, storages)


def require_tensors(folder: Path, shapes: dict[str, tuple[int, ...]], fresh: Sequence[str] = FRESH) -> dict[str, Path]:
    """The file of each tensor of a folder that has the tensors of `shapes`, but perhaps those of `fresh`. Reads headers
    alone.

    Raises:
        ValueError: as `load_hf`.
    """
    files = tensor_files(folder)
    _check(folder, files, shapes, {name for name in fresh if name not in files})
    return files


def _read(tensors: Any, shard: Shard, storages: dict[str, Tensor]) -> None:
    stored = tensors.get_slice(shard.box.name)
    for part in shard.box.cut(PIECE_NUMEL):
        shard.view(storages, part).copy_(stored[part.slices])


def _check(folder: Path, files: dict[str, Path], shapes: dict[str, tuple[int, ...]], fresh: set[str]) -> None:
    found = {name: tuple(entry["shape"]) for file in set(files.values()) for name, entry in read_header(file).items()}
    faults = [f"{name}: missing" for name in shapes if name not in found and name not in fresh]
    faults += [f"{name}: shape {found[name]}, and config.json says {shape}"
               for name, shape in shapes.items() if name in found and found[name] != shape]
    faults += [f"{name}: not a tensor of this architecture" for name in sorted(found)
               if name not in shapes and name not in HEADS and not name.endswith("rotary_emb.inv_freq")]
    if faults:
        raise ValueError(f"{folder}: its tensors are not the model's: {'; '.join(faults[:8])}")
