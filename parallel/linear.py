"""Linear layers whose weight is cut over the tensor axis: by output features (column) or by input features (row).

Owns the two layers and their communication (Megatron-LM, arXiv 1909.08053 section 3; with sequence parallelism arXiv
2205.05198 section 4.2.2). Never initialises weights: they are uninitialised memory until someone loads or draws them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridflow.parallel.collectives import copy_to, gather_tokens, reduce_from, reduce_scatter_tokens
from hybridflow.parallel.mesh import AxisGroup


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with this rank's rows of W: every rank gets all tokens of its own output features.

    Args:
        in_features: width of the whole input.
        out_features_per_rank: this rank's output features (fused matrices count all their rows).
        bias: whether there is a bias, cut like the rows of W.
        tp: the tensor group.
        sequence_parallel: whether the input holds only this rank's tokens; they are gathered here.
    Input `[tokens, in]`, or `[tokens/tp, in]` under sequence parallelism; output `[tokens, out_per_rank]`.
    """

    def __init__(
        self,
        in_features: int,
        out_features_per_rank: int,
        *,
        bias: bool,
        tp: AxisGroup,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.weight = nn.Parameter(torch.empty(out_features_per_rank, in_features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_features_per_rank, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = gather_tokens(x, self.tp) if self.sequence_parallel else copy_to(x, self.tp)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x_r W_r^T, plus b, with this rank's columns of W.

    The bias is whole on every rank and added after the sum. Under sequence parallelism each rank adds it to its own
    tokens only, so its gradient must then be summed over `tp` (a `GradSync`).

    Args:
        in_features_per_rank: this rank's input features.
        out_features: width of the whole output.
        bias, tp: as in `ColumnParallelLinear`.
        sequence_parallel: whether the output keeps only this rank's tokens.
    Input `[tokens, in_per_rank]`; output `[tokens, out]`, or `[tokens/tp, out]` under sequence parallelism.
    """

    def __init__(
        self,
        in_features_per_rank: int,
        out_features: int,
        *,
        bias: bool,
        tp: AxisGroup,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.weight = nn.Parameter(torch.empty(out_features, in_features_per_rank, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        partial = F.linear(x, self.weight)
        y = reduce_scatter_tokens(partial, self.tp) if self.sequence_parallel else reduce_from(partial, self.tp)
        return y if self.bias is None else y + self.bias
