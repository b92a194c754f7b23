"""How a generation stage's matrices lie in memory while it decodes.

Owns a change of strides, never of values, shapes or names. Training stages keep their rows contiguous.
"""

from __future__ import annotations

import torch
from torch import nn

from hybridflow.models.decoder import HeadWeight
from hybridflow.parallel.linear import ColumnParallelLinear, RowParallelLinear

PACKED_EVERY_CALL = (torch.float32, torch.float64)


def lay_out_for_decoding(stage: nn.Module) -> None:
    """Store each fp32 or fp64 matrix of a CPU stage with its columns contiguous (`weight.T` is contiguous).

    A step multiplies few rows, and MKL then spends half its time on packing a transposed operand. One thread, fp32,
    `F.linear` of M rows, microseconds before and after: 256 -> 1408: M=1 27, 16; M=8 103, 60; M=32 176, 129;
    2048 -> 768: M=8 665, 292; M=32 1108, 644; equal from M=128 on. Embeddings keep their rows, which are looked up.

    Call it when the weights are in: shards address a storage by its elements in row order, so before the next write
    the parameters need new memory.
    """
    for module in stage.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear, HeadWeight)):
            weight = module.weight
            if weight.device.type == "cpu" and weight.dtype in PACKED_EVERY_CALL:
                weight.data = weight.data.T.contiguous().T
