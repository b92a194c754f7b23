"""The gradients of linear layers' weights: added straight into main gradients, at once or later.

Owns the product grad^T x of a linear and when it runs. A zero-bubble schedule splits the backward of a micro-batch into
the gradient of its input, which the stage before waits for, and the gradients of its matrices, which can fill a bubble
(arXiv 2401.10241 section 2). Never owns a main gradient (that is `gradients`) and never decides what runs when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridflow.parallel.linear import ColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True)
class WeightWork:
    """The gradient of `weight` that one use of it adds: grad^T x, from the gradient `[tokens, out]` of the linear's
    output and its input `[tokens, in]`.
    """

    weight: nn.Parameter
    grad: Tensor
    x: Tensor


@dataclass(frozen=True)
class _Target:
    main_grad: Callable[[], Tensor]
    ready: Callable[[], None]


class WeightGrads:
    """Adds the weight gradients of the linears that it is attached to into their main gradients.

    A registered weight gets no gradient from autograd: what it would get is added to its main gradient in that dtype,
    without a pass over memory in between and without rounding 16-bit products.

    Example: a backward whose weight gradients run later:

        with weight_grads.keeping() as kept:
            loss.backward()
        weight_grads.run(kept)
    """

    def __init__(self) -> None:
        self._targets: dict[nn.Parameter, _Target] = {}
        self._kept: list[WeightWork] | None = None  # None: nothing is kept, work runs at once
        self.runs_kept = False  # whether work of an earlier backward is being done

    @property
    def weights(self) -> Set[nn.Parameter]:
        """The registered weights."""
        return self._targets.keys()

    def register(self, weight: nn.Parameter, main_grad: Callable[[], Tensor], ready: Callable[[], None]) -> None:
        """From now on, add each gradient of `weight` to `main_grad()`, of the weight's shape, and then call `ready`."""
        self._targets[weight] = _Target(main_grad, ready)

    def add(self, weight: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        """Add grad^T x to the main gradient of a registered weight, or keep it for later while `keeping`.

        Args:
            grad: `[tokens, out]`, of the output of a linear.
            x: `[tokens, in]`, its input.
        """
        if self._kept is None:
            self._accumulate(weight, grad, x)
        else:
            # Detached: the graph behind x, of which nothing else is needed until W, can go.
            self._kept.append(WeightWork(weight, grad, x.detach()))

    @contextmanager
    def keeping(self) -> Iterator[list[WeightWork]]:
        """Keep the work that arrives within, in the list that this gives."""
        assert self._kept is None, "weight gradients are being kept already"
        self._kept = kept = []
        try:
            yield kept
        finally:
            self._kept = None

    def run(self, kept: list[WeightWork]) -> None:
        """Do work that was kept, in its order. Each piece is let go once it is done: the list ends empty."""
        kept.reverse()
        self.runs_kept = True
        try:
            with torch.no_grad():
                while kept:
                    work = kept.pop()
                    self._accumulate(work.weight, work.grad, work.x)
                    del work  # before the next product needs memory
        finally:
            self.runs_kept = False

    def _accumulate(self, weight: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        target = self._targets[weight]
        add_product(target.main_grad(), grad, x)
        target.ready()


def add_product(main_grad: Tensor, grad: Tensor, x: Tensor) -> None:
    """main_grad += grad^T x, in the dtype of `main_grad`: the products of 16-bit operands are never rounded to 16 bits.

    Args:
        main_grad: `[out, in]`; `grad`: `[tokens, out]`; `x`: `[tokens, in]`.
    """
    if main_grad.dtype == x.dtype == grad.dtype:
        main_grad.addmm_(grad.T, x)
    elif x.device.type == "cuda" and x.dtype == grad.dtype and main_grad.dtype is torch.float32:
        main_grad.add_(torch.mm(grad.T, x, out_dtype=torch.float32))
    else:
        main_grad.addmm_(grad.T.to(main_grad.dtype), x.to(main_grad.dtype))


def attach(module: nn.Module, weight_grads: WeightGrads) -> list[nn.Parameter]:
    """Have every tensor-parallel linear in `module` hand over the gradients of those weights that get registered.

    Returns:
        their weights, in module order.
    """
    linears = [part for part in module.modules() if isinstance(part, (ColumnParallelLinear, RowParallelLinear))]
    for linear in linears:
        linear.weight_grads = weight_grads
    return [linear.weight for linear in linears]
