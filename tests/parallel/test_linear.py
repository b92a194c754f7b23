"""Tensor-parallel linears against the whole matrices: outputs and all gradients, also under sequence parallelism."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hybridflow.parallel.linear import ColumnParallelLinear, RowParallelLinear
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.weight_grads import WeightGrads, attach
from hybridflow.parallel.world import World
from tests.ranks import run_ranks

IN, INNER, OUT = 5, 8, 3
CPU = torch.device("cpu")


def inputs(tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = {"x": (tokens, IN), "w1": (INNER, IN), "b1": (INNER,), "w2": (OUT, INNER), "b2": (OUT,), "g": (tokens, OUT)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in sizes.items()}


def whole(tokens: int) -> dict[str, torch.Tensor]:
    """The two layers in one process, with the gradient of sum(g * y)."""
    full = {name: tensor.requires_grad_() for name, tensor in inputs(tokens).items()}
    y = F.linear(torch.tanh(F.linear(full["x"], full["w1"], full["b1"])), full["w2"], full["b2"])
    (y * full["g"].detach()).sum().backward()
    return {"y": y.detach()} | {name: tensor.grad for name, tensor in full.items() if tensor.grad is not None}


def two_layers(world: World, tokens: int, sequence_parallel: bool, taken: bool) -> None:
    """`taken`: the gradients of the matrices are taken from autograd, and computed after the backward."""
    tp = Mesh(Grid.of(Layout(tp=world.size)), world).tp
    full, want = inputs(tokens), whole(tokens)
    inner = slice(tp.index * INNER // tp.size, (tp.index + 1) * INNER // tp.size)
    mine = slice(tp.index * tokens // tp.size, (tp.index + 1) * tokens // tp.size) if sequence_parallel else slice(None)
    options = dict(bias=True, tp=tp, sequence_parallel=sequence_parallel, dtype=torch.float64, device=CPU)
    column = ColumnParallelLinear(IN, INNER // tp.size, **options)
    row = RowParallelLinear(INNER // tp.size, OUT, **options)
    with torch.no_grad():
        column.weight.copy_(full["w1"][inner])
        column.bias.copy_(full["b1"][inner])
        row.weight.copy_(full["w2"][:, inner])
        row.bias.copy_(full["b2"])
    weight_grads = WeightGrads()
    for weight in attach(nn.ModuleList([column, row]), weight_grads) if taken else []:
        main_grad = torch.zeros_like(weight)
        weight_grads.register(weight, lambda main_grad=main_grad: main_grad,
                              lambda weight=weight, main_grad=main_grad: setattr(weight, "grad", main_grad))
    x = full["x"][mine].clone().requires_grad_()
    y = row(torch.tanh(column(x)))
    with weight_grads.keeping() as kept:
        (y * full["g"][mine]).sum().backward()
    assert len(kept) == 2 * taken and (column.weight.grad is None) == taken
    weight_grads.run(kept)
    close = lambda got, name, part: torch.testing.assert_close(got, want[name][part], rtol=1e-12, atol=1e-12)  # noqa: E731
    close(y.detach(), "y", mine)
    close(x.grad, "x", mine)
    close(column.weight.grad, "w1", inner)
    close(column.bias.grad, "b1", inner)
    close(row.weight.grad, "w2", (slice(None), inner))
    bias_grad = row.bias.grad.clone()
    if sequence_parallel:  # each rank has its own tokens' part: this is the sum that a GradSync declares
        torch.distributed.all_reduce(bias_grad, group=tp.process_group)
    close(bias_grad, "b2", slice(None))


@pytest.mark.parametrize("taken", [False, True])
def test_one_rank_is_the_whole(taken: bool) -> None:
    for tokens in (0, 1, 7):
        two_layers(World.single(CPU), tokens, False, taken)


@pytest.mark.parametrize("taken", [False, True])
def test_tensor_parallel(taken: bool) -> None:
    for tokens in (0, 7):
        run_ranks(4, two_layers, tokens, False, taken)


@pytest.mark.parametrize("taken", [False, True])
def test_sequence_parallel(taken: bool) -> None:
    run_ranks(4, two_layers, 12, True, taken)


def test_without_bias() -> None:
    tp = Mesh(Grid.of(Layout()), World.single(CPU)).tp
    layer = ColumnParallelLinear(IN, OUT, bias=False, tp=tp, sequence_parallel=False, dtype=torch.float64, device=CPU)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
