"""Weight gradients taken from autograd: equal to its own, at once or later, in every dtype, recomputed or not."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hybridflow.bench.live_bytes import LiveBytes
from hybridflow.parallel.linear import ColumnParallelLinear, RowParallelLinear, linear
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.weight_grads import WeightGrads, add_product, attach
from hybridflow.parallel.world import World

CPU = torch.device("cpu")
IN, INNER, OUT = 5, 7, 3


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class TwoLayers(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        tp = Mesh(Grid.of(Layout()), World.single(CPU)).tp
        options = dict(bias=True, tp=tp, sequence_parallel=False, dtype=dtype, device=CPU)
        self.first, self.second = ColumnParallelLinear(IN, INNER, **options), RowParallelLinear(INNER, OUT, **options)
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(random(*parameter.shape, seed=seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Mains:
    """Main gradients of a module's linears, and the order in which they got something."""

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float64) -> None:
        self.weight_grads, self.ready = WeightGrads(), []
        self.grads = {}
        names = {parameter: name for name, parameter in module.named_parameters()}
        for weight in attach(module, self.weight_grads):
            name = names[weight]
            self.grads[name] = torch.zeros(weight.shape, dtype=dtype)
            self.weight_grads.register(weight, lambda name=name: self.grads[name],
                                       lambda name=name: self.ready.append(name))


def autograd(tokens: int, x_learns: bool = True) -> dict[str, torch.Tensor]:
    module, x = TwoLayers(), random(tokens, IN).requires_grad_(x_learns)
    module(x).square().sum().backward()
    return {"x": x.grad} | {name: parameter.grad for name, parameter in module.named_parameters()}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("x_learns", [True, False])
def test_gradients_are_those_of_autograd(tokens: int, x_learns: bool):
    module, x, want = TwoLayers(), random(tokens, IN).requires_grad_(x_learns), autograd(tokens, x_learns)
    mains = Mains(module)
    assert mains.weight_grads.weights == {module.first.weight, module.second.weight}
    module(x).square().sum().backward()
    assert module.first.weight.grad is None and module.second.weight.grad is None
    assert mains.ready == ["second.weight", "first.weight"]
    for name, grad in mains.grads.items():
        close(grad, want[name])
    close(module.first.bias.grad, want["first.bias"])
    close(module.second.bias.grad, want["second.bias"])
    assert (x.grad is not None) == x_learns
    if x_learns:
        close(x.grad, want["x"])


@pytest.mark.parametrize("recompute", [False, True])
def test_kept_work_runs_when_asked(recompute: bool):
    module, x, want = TwoLayers(), random(9, IN).requires_grad_(), autograd(9)
    mains = Mains(module)
    weight_grads = mains.weight_grads
    out = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
    with weight_grads.keeping() as kept:
        out.square().sum().backward()
    assert mains.ready == [] and len(kept) == 2
    close(x.grad, want["x"])
    weight_grads.run(kept)
    assert kept == [] and mains.ready == ["second.weight", "first.weight"]
    for name, grad in mains.grads.items():
        close(grad, want[name])
    module(x).square().sum().backward()  # nothing is kept any more, and gradients add up
    close(mains.grads["first.weight"], 2.0 * want["first.weight"])


def test_each_piece_of_kept_work_is_let_go_when_it_is_done():
    module = TwoLayers()
    mains = Mains(module)
    with mains.weight_grads.keeping() as kept:
        module(random(9, IN)).square().sum().backward()
    inputs = [weakref.ref(work.x) for work in kept]
    alive = []
    for weight in mains.weight_grads.weights:
        mains.weight_grads.register(weight, lambda weight=weight: torch.zeros(weight.shape, dtype=torch.float64),
                                    lambda: alive.append(sum(x() is not None for x in inputs)))
    mains.weight_grads.run(kept)
    assert alive == [2, 1] and not any(x() is not None for x in inputs)


def test_a_kept_backward_keeps_inputs_and_gradients_of_linears_only():
    """What is alive between B and W, to the byte."""
    tokens, module = 400, TwoLayers()
    mains, x = Mains(module), random(tokens, IN).requires_grad_()
    with LiveBytes() as live:
        with mains.weight_grads.keeping() as kept:
            module(x).square().sum().backward()
        biases = INNER + OUT
        assert live.now == 8 * (tokens * (INNER + INNER + OUT) + x.numel() + biases)  # tanh, 2 gradients, x.grad
        mains.weight_grads.run(kept)
        assert live.now == 8 * (x.numel() + biases)


def test_a_weight_that_does_not_learn_gets_nothing():
    module, x = TwoLayers(), random(9, IN).requires_grad_()
    mains = Mains(module)
    module.first.weight.requires_grad_(False)
    module(x).square().sum().backward()
    assert mains.ready == ["second.weight"] and not mains.grads["first.weight"].any()
    close(x.grad, autograd(9)["x"])


def test_an_unregistered_weight_is_autograds():
    module, weight_grads = TwoLayers(), WeightGrads()
    assert attach(module, weight_grads) == [module.first.weight, module.second.weight]
    module(random(9, IN)).square().sum().backward()
    close(module.first.weight.grad, autograd(9, x_learns=False)["first.weight"])


def test_without_gradients_the_node_costs_nothing():
    module = TwoLayers()
    mains = Mains(module)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert module(random(9, IN)).grad_fn is None
    assert mains.ready == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products_are_not_rounded(dtype: torch.dtype):
    """Ten products into one fp32 gradient: as exact as fp32, where adding rounded products is not."""
    weight, main_grad = nn.Parameter(random(OUT, IN, dtype=dtype)), torch.zeros(OUT, IN)
    weight_grads, rounded = WeightGrads(), torch.zeros(OUT, IN)
    weight_grads.register(weight, lambda: main_grad, lambda: None)
    want = torch.zeros(OUT, IN, dtype=torch.float64)
    for seed in range(10):
        x, g = random(50, IN, dtype=dtype, seed=seed), random(50, OUT, dtype=dtype, seed=100 + seed)
        linear(x, weight, None, weight_grads).backward(g)
        want += g.double().T @ x.double()
        rounded += g.T @ x
    torch.testing.assert_close(main_grad.double(), want, rtol=0.0, atol=5e-5)
    assert (rounded.double() - want).abs().max() > 1e-3


def test_products_of_mixed_dtypes():
    x, g = random(6, IN, dtype=torch.float32), random(6, OUT, dtype=torch.float32)
    main_grad = torch.ones(OUT, IN, dtype=torch.float64)
    add_product(main_grad, g, x)
    close(main_grad, 1.0 + g.double().T @ x.double())


def test_a_gradient_that_is_an_expanded_number():
    weight = nn.Parameter(random(OUT, IN))
    main_grad, weight_grads, x = torch.zeros(OUT, IN, dtype=torch.float64), WeightGrads(), random(6, IN)
    weight_grads.register(weight, lambda: main_grad, lambda: None)
    linear(x, weight, None, weight_grads).sum().backward()
    close(main_grad, torch.ones(OUT, 6, dtype=torch.float64) @ x)


def test_what_a_linear_keeps_alive():
    """The input and nothing else: as much as autograd keeps."""
    weight, saved = nn.Parameter(random(OUT, IN)), []
    weight_grads = WeightGrads()
    weight_grads.register(weight, lambda: torch.zeros(OUT, IN), lambda: None)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = random(6, IN)
        y = linear(x, weight, None, weight_grads)
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr()]
    close(y.detach(), F.linear(x, weight.detach()))
