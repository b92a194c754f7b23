"""Products of a trainer's linear layers: against fp64, and that a row's bits depend on no other row and no thread."""

import pytest
import torch
import torch.nn.functional as F

from hybridflow.kernels import native_ops, products
from hybridflow.kernels.native_build import Unavailable, native_library

FOUND = native_library()
if isinstance(FOUND, Unavailable):
    pytest.skip(FOUND.reason, allow_module_level=True)

# Depths of one, two and three blocks of k; rows of several blocks with every remainder of a tile; panels with a rest.
SHAPES = [(1, 1, 1), (5, 33, 7), (64, 352, 32), (121, 353, 100), (250, 705, 48), (363, 40, 257)]


@pytest.fixture(autouse=True)
def one_thread():
    native_ops.set_threads(1)
    yield
    native_ops.set_threads(1)


def drawn(*shape, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def close(found, exact, magnitudes, k):
    """Chains of k fused operations err by at most k half units of the sum of magnitudes (Higham 2002, 3.1)."""
    bound = (k + 4) * torch.finfo(found.dtype).eps * (magnitudes + 1)
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m, k, n", SHAPES)
def test_product_is_right_on_any_threads_and_row_by_row(m, k, n, dtype):
    x, w = drawn(m, k + 3, dtype=dtype)[:, :k], drawn(n, k, dtype=dtype)  # rows that lie apart
    before = drawn(m, n, dtype=dtype)
    exact, magnitudes = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    found = products.product(x, w, torch.empty(m, n, dtype=dtype), add=False)
    close(found, exact, magnitudes, k)
    added = products.product(x, w, before.clone(), add=True)
    close(added, exact + before.double(), magnitudes + before.double().abs(), k)
    turned = products.product(x, w.T.contiguous().T, torch.empty(m, n, dtype=dtype), add=False)
    assert torch.equal(turned, found)
    for threads in (2, 3):
        native_ops.set_threads(threads)
        assert torch.equal(products.product(x, w, torch.empty(m, n, dtype=dtype), add=False), found)
    native_ops.set_threads(1)
    some = x[m // 3 : m // 3 + 4]
    alone = products.product(some, w, torch.empty(len(some), n, dtype=dtype), add=False)
    assert torch.equal(alone, found[m // 3 : m // 3 + 4])


@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_and_the_gradient_of_its_input(gains, with_bias, monkeypatch):
    monkeypatch.setattr(products, "native_gains", lambda: gains)
    x, w, bias = drawn(70, 40, dtype=torch.float32), drawn(33, 40, dtype=torch.float32), drawn(33, dtype=torch.float32)
    bias = bias if with_bias else None
    assert products.gains(x, w) is gains
    torch.testing.assert_close(products.linear(x, w, bias), F.linear(x, w, bias), rtol=1e-5, atol=1e-5)
    grad = drawn(70, 33, dtype=torch.float32)
    torch.testing.assert_close(products.matmul(grad, w), grad @ w, rtol=1e-5, atol=1e-5)


def test_torch_computes_what_does_not_gain(monkeypatch):
    monkeypatch.setattr(products, "native_gains", lambda: True)
    x, w = torch.ones(64, 64), torch.ones(32, 64)
    assert products.gains(x, w)
    assert not products.gains(x[:63], w) and not products.gains(x, w[:31])
    assert not products.gains(x.T, w) and not products.gains(x[None], w)
    assert not products.gains(x.double(), w.double()) and not products.gains(x.bfloat16(), w.bfloat16())
    assert not products.gains(torch.ones(64, 1024), torch.ones(32, 1024))  # rows 4 KiB apart
