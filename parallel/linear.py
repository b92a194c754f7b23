"""Linear layers whose weight is cut over the tensor axis: by output features (column) or by input features (row).

Owns the two layers and their communication (Megatron-LM, arXiv 1909.08053 section 3; with sequence parallelism arXiv
2205.05198 section 4.2.2). Never initialises weights: they are uninitialised memory until someone loads or draws them.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridflow.kernels import products
from hybridflow.parallel.collectives import (
    copy_to,
    gather_tokens,
    reduce_from,
    reduce_scatter_tokens,
    tree_reduce_from,
)
from hybridflow.parallel.mesh import AxisGroup
from hybridflow.parallel.tiles import Tiles


class TakesWeightGrads(Protocol):
    """Who computes the gradients of `weights` in place of autograd (see `weight_grads`)."""

    @property
    def weights(self) -> Set[nn.Parameter]: ...

    def add(self, weight: nn.Parameter, grad: Tensor, x: Tensor) -> None: ...


class Product(Protocol):
    """A forward in place of `F.linear`'s, without a gradient of its own; its result may be wider than `x`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...


def linear(x: Tensor, weight: nn.Parameter, bias: Tensor | None, weight_grads: TakesWeightGrads | None,
           product: Product | None = None) -> Tensor:
    """y = x W^T + b. The gradient of a weight that is one of `weight_grads.weights` is left to it: autograd gives none.

    Args:
        x: `[tokens, in]`, of 0 tokens too.
        weight: `[out, in]`.
        bias: `[out]`.
        weight_grads: None leaves all to autograd.
        product: computes y; None is `kernels.products`.
    """
    if weight_grads is not None and not (torch.is_grad_enabled() and weight in weight_grads.weights):
        weight_grads = None
    if weight_grads is None and product is None and not products.gains(x, weight):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, weight_grads, products.linear if product is None else product)


class _Linear(torch.autograd.Function):
    """The weight itself stays with the node, since hooks on saved tensors (recomputation) give back other objects."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        weight_grads: TakesWeightGrads | None,
        product: Product,
    ) -> Tensor:
        ctx.weight, ctx.weight_grads = weight, weight_grads
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad = grad.to(ctx.weight.dtype)  # of a product that is wider than its factors
        grad_weight = None
        if needs_weight and ctx.weight_grads is not None:
            ctx.weight_grads.add(ctx.weight, grad, *ctx.saved_tensors)
        elif needs_weight:
            grad_weight = grad.T @ ctx.saved_tensors[0]
        grad_x = products.matmul(grad, ctx.weight) if needs_x else None
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None, None, None


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with this rank's rows of W: every rank gets all tokens of its own output features.

    Args:
        in_features: width of the whole input.
        out_features_per_rank: this rank's output features (fused matrices count all their rows).
        bias: whether there is a bias, cut like the rows of W.
        tp: the tensor group.
        sequence_parallel: whether the input holds only this rank's tokens; they are gathered here, and all of them are
            kept for the gradient of W.
    Attributes:
        product: computes this rank's products, without the sum over ranks; None is `kernels.products`.
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
        self.weight_grads: TakesWeightGrads | None = None
        self.product: Product | None = None
        self.tiles: Tiles | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.tiles is not None:
            return self.tiles.linear(x, self.bias)
        x = gather_tokens(x, self.tp) if self.sequence_parallel else copy_to(x, self.tp)
        return linear(x, self.weight, self.bias, self.weight_grads, self.product)


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x_r W_r^T, plus b, with this rank's columns of W.

    The bias is whole on every rank and added after the sum. Under sequence parallelism each rank adds it to its own
    tokens only, so its gradient must then be summed over `tp` (a `GradSync`).

    Args:
        in_features_per_rank: this rank's input features.
        out_features: width of the whole output.
        bias, tp: as in `ColumnParallelLinear`.
        sequence_parallel: whether the output keeps only this rank's tokens.
    Attributes:
        product: as in `ColumnParallelLinear`. With one, the sum over ranks is a `tree_sum`, rounded to the dtype of the
            input after it.
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
        self.weight_grads: TakesWeightGrads | None = None
        self.product: Product | None = None
        self.tiles: Tiles | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.tiles is None:
            partial = linear(x, self.weight, None, self.weight_grads, self.product)
        else:
            partial = self.tiles.linear(x, None)
        reduce = reduce_from if self.product is None else tree_reduce_from
        y = reduce_scatter_tokens(partial, self.tp) if self.sequence_parallel else reduce(partial, self.tp)
        y = y.to(x.dtype)
        return y if self.bias is None else y + self.bias
