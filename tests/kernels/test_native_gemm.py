"""Products of packed weights: against torch, and bit for bit whatever the batch, the threads and the cut of k."""

import pytest
import torch
from torch.nn.functional import linear

from hybridflow.kernels import native_ops, native_rows
from hybridflow.kernels.native_build import Unavailable, native_library

FOUND = native_library()
if isinstance(FOUND, Unavailable):
    pytest.skip(FOUND.reason, allow_module_level=True)

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SIZES = (1, 2, 15, 16, 33, 63, 100, 256)


@pytest.fixture(autouse=True)
def one_thread():
    native_ops.set_threads(1)
    yield
    native_ops.set_threads(1)


def drawn(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("k", SIZES)
def test_product_is_torchs(n, k, dtype):
    w, bias = drawn(n, k, dtype=dtype, seed=1), drawn(n, dtype=dtype, seed=2)
    packed = native_ops.pack(w)
    for m in (1, 3, 7, 13, 30):
        x = drawn(m, k, dtype=dtype, seed=m)
        for b in (None, bias):
            exact = linear(x.double(), w.double(), None if b is None else b.double())
            wide = native_ops.linear(x, packed, b, wide=True)
            assert wide.dtype == native_ops.COMPUTE[dtype]
            # A chain of k fused operations errs by at most k half units of the sum of magnitudes (Higham 2002, 3.1).
            bound = (k + 2) * torch.finfo(wide.dtype).eps * (linear(x.double().abs(), w.double().abs()) + 4)
            assert ((wide.double() - exact).abs() <= bound).all()
            # The narrow answer is the wide one rounded once, to nearest even as torch rounds.
            assert same_bits(native_ops.linear(x, packed, b), wide.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k, segments", [(1, 1, 1), (63, 100, 4), (100, 63, 1), (320, 256, 1), (257, 704, 2)])
def test_row_has_the_same_bits_in_every_batch_and_on_any_threads(n, k, segments, dtype):
    packed, bias = native_ops.pack(drawn(n, k, dtype=dtype)), drawn(n, dtype=dtype, seed=1)
    x = drawn(50, k, dtype=dtype, seed=2)
    alone = torch.cat([native_ops.linear(row[None], packed, bias, segments, wide=True) for row in x])
    for threads in (1, 2, 3):
        native_ops.set_threads(threads)
        for m in range(1, 27) if threads == 1 else (1, 5, 26, 50):
            assert same_bits(native_ops.linear(x[50 - m :], packed, bias, segments, wide=True), alone[50 - m :])


def tree(parts):
    while len(parts) > 1:
        pairs = [parts[i] + parts[i + 1] for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, part", [(1, 1), (63, 25), (100, 7), (96, 64)])
@pytest.mark.parametrize("segments", [2, 3, 4, 6, 8, 13])
def test_product_cut_over_ranks_and_summed_by_the_tree_is_the_whole(n, part, segments, dtype):
    k = part * segments
    w = drawn(n, k, dtype=dtype)
    for m in (1, 2, 5, 14):
        x = drawn(m, k, dtype=dtype, seed=1)
        whole = native_ops.linear(x, native_ops.pack(w), None, segments, wide=True)
        for ranks in (r for r in (2, 3, 4, segments) if segments % r == 0 and (segments // r).bit_count() == 1):
            cuts = zip(x.chunk(ranks, dim=1), w.chunk(ranks, dim=1))  # strided rows and strided weights
            parts = [native_ops.linear(a, native_ops.pack(b), None, segments // ranks, wide=True) for a, b in cuts]
            assert same_bits(tree(parts), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_is_one_ascending_chain(dtype):
    """1 + tiny + ... + tiny rounds to 1 at every step; any other order or a partial sum would keep the tiny ones."""
    k, compute = 200, native_ops.COMPUTE[dtype]
    w = torch.full((40, k), torch.finfo(compute).eps / 4, dtype=dtype)
    w[:, 0] = 1
    packed = native_ops.pack(w)
    for m in (1, 2, 4, 8, 12, 20):
        y = native_ops.linear(torch.ones(m, k, dtype=dtype), packed, wide=True)
        assert (y == 1).all()
    assert (native_ops.linear(torch.ones(5, k, dtype=dtype), packed, None, 2, wide=True) > 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_prefill_strided_rows_and_poisoned_surroundings(dtype):
    m, n, k = 700, 70, 2000
    wide_x = torch.full((m, k + 3), float("nan"), dtype=dtype)
    wide_x[:, 1:-2] = drawn(m, k, dtype=dtype)
    x, packed = wide_x[:, 1:-2], native_ops.pack(drawn(k, n, dtype=dtype).t())
    for threads in (1, 2):
        native_ops.set_threads(threads)
        y = native_ops.linear(x, packed, wide=True)
        rows = [0, 1, 11, 12, 255, 699]
        assert same_bits(y[rows], native_ops.linear(x[rows], packed, wide=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_batch_and_leading_dims(dtype):
    packed = native_ops.pack(drawn(5, 9, dtype=dtype))
    assert native_ops.linear(drawn(0, 9, dtype=dtype), packed).shape == (0, 5)
    x = drawn(2, 3, 9, dtype=dtype)
    assert same_bits(native_ops.linear(x, packed), native_ops.linear(x.view(6, 9), packed).view(2, 3, 5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k", [(1, 1), (63, 100), (100, 63), (160, 256)])
def test_gated_pair_has_the_bits_of_two_products(n, k, dtype):
    gate, up = drawn(n, k, dtype=dtype), drawn(n, k, dtype=dtype, seed=1)
    pair, halves = native_ops.pack_pair(gate, up), [native_ops.pack(w) for w in (gate, up)]
    x = drawn(30, k, dtype=dtype, seed=2)
    apart = native_rows.swiglu(torch.cat([native_ops.linear(x, half) for half in halves], dim=1))
    for threads in (1, 2, 3):
        native_ops.set_threads(threads)
        for m in (1, 2, 4, 5, 12, 30) if threads == 1 else (1, 30):
            assert same_bits(native_ops.gated_linear(x[:m], pair), apart[:m])


def test_infinities_and_nans_are_kept():
    x = torch.tensor([[1.0, float("inf")], [float("nan"), 1.0], [float("inf"), float("-inf")]], dtype=torch.bfloat16)
    y = native_ops.linear(x, native_ops.pack(torch.ones(3, 2, dtype=torch.bfloat16)))
    assert torch.isinf(y[0]).all() and torch.isnan(y[1:]).all()


def test_wrong_arguments_are_named():
    packed = native_ops.pack(torch.ones(5, 9))
    with pytest.raises(ValueError, match=r"x is \[2, 8\].*takes \[\.\.\., 9\]"):
        native_ops.linear(torch.ones(2, 8), packed)
    with pytest.raises(ValueError, match="bias is"):
        native_ops.linear(torch.ones(2, 9), packed, torch.ones(4))
    with pytest.raises(ValueError, match="segments is 2: must divide k, which is 9"):
        native_ops.linear(torch.ones(2, 9), packed, None, 2)
    with pytest.raises(ValueError, match=r"float16.*must be fp32, bf16 or fp64"):
        native_ops.pack(torch.ones(5, 9, dtype=torch.float16))
    with pytest.raises(ValueError, match="threads is 0"):
        native_ops.set_threads(0)
