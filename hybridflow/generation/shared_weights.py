"""How a generation stage computes with weights that lie in memory of others: aliases and tiles in place of parameters.

Owns what a stage is lent and that it is taken back. It never allocates a weight and never moves one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridflow.models.decoder import DecoderStage, HeadWeight
from hybridflow.parallel.linear import ColumnParallelLinear, RowParallelLinear
from hybridflow.parallel.share import Alias, Place
from hybridflow.parallel.tiles import tiles_at, vector_at
from hybridflow.parallel.vocab import VocabParallelEmbedding

TILED = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, HeadWeight)


def lend(stage: DecoderStage, tiling: Mapping[str, Place], storages: Mapping[str, Tensor]) -> None:
    """Let `stage` compute with the weights in `storages` where they lie, without a copy.

    It may sample then, not train or score. A parameter that lies in one piece becomes a view of it; a matrix in several
    leaves its parameter empty. What is written to `storages` later holds at once; a storage that moves must be lent
    again.

    Args:
        tiling: of this rank (`share.tiling`), for every parameter of the stage.
        storages: all that `tiling` names.
    """
    take_back(stage)
    assert tiling.keys() == dict(stage.named_parameters()).keys(), "the tiling is of another stage"
    for name, place in tiling.items():
        owner, _, kind = name.rpartition(".")
        module = stage.get_submodule(owner)
        matrix = vector_at(place, storages) if isinstance(place, Alias) else tiles_at(place, storages)
        if isinstance(matrix, Tensor):
            module.get_parameter(kind).data = matrix
        else:
            assert isinstance(module, TILED), name
            module.tiles = matrix


def take_back(stage: DecoderStage) -> None:
    """Leave the stage without weights: nothing of what it was lent is referred to any more."""
    for module in stage.modules():
        if isinstance(module, TILED):
            module.tiles = None
    for parameter in stage.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
