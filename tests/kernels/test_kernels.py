"""Every kernel against its reference: outputs and gradients, odd sizes, fp64 and bf16."""

import math

import pytest
import torch

from hybridflow.kernels.activation import swiglu, swiglu_reference
from hybridflow.kernels.attention import causal_attention, causal_attention_reference, causal_suffix_attention
from hybridflow.kernels.norm import rms_norm, rms_norm_reference
from hybridflow.kernels.rope import apply_rope, apply_rope_reference

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}


def assert_same(fast, reference, inputs, dtype):
    """Outputs and the gradients of all inputs agree, for one random output gradient."""
    inputs = [x.to(dtype) for x in inputs]
    ours = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.clone().requires_grad_() for x in inputs]
    out, expected = fast(*ours), reference(*theirs)
    assert out.dtype == dtype and out.shape == expected.shape
    torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    out.backward(grad)
    expected.backward(grad)
    for a, b in zip(ours, theirs):
        assert a.grad.dtype == dtype
        torch.testing.assert_close(a.grad, b.grad, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 4)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 100), (63, 100), (0, 100), (7, 3, 10)], ids=str)
def test_rms_norm(shape, dtype):
    """Also heads `[tokens, heads, head_dim]`, a strided view, and no tokens."""
    assert_same(lambda x, w: rms_norm(x, w, 1e-3), lambda x, w: rms_norm_reference(x, w, 1e-3),
                [numbers(*shape), numbers(shape[-1], seed=1)], dtype)
    assert_same(lambda x, w: rms_norm(x[..., :5], w[:5], 1e-3),
                lambda x, w: rms_norm_reference(x[..., :5], w[:5], 1e-3),
                [numbers(*shape), numbers(shape[-1], seed=1)], dtype)


def test_rms_norm_by_hand():
    """Mean square of [3, 4] is 12.5."""
    out = rms_norm(torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([1.0, 10.0], dtype=torch.float64), 0.0)
    torch.testing.assert_close(out, torch.tensor([3, 40], dtype=torch.float64) / math.sqrt(12.5))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 63])
def test_swiglu(tokens, dtype):
    assert_same(swiglu, swiglu_reference, [numbers(tokens, 2 * 33)], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "length"), [(1, 4, 2, 1), (3, 6, 2, 63), (2, 3, 3, 100)])
def test_causal_attention(rows, heads, kv_heads, length, dtype):
    assert_same(causal_attention, causal_attention_reference,
                [numbers(rows, heads, length, 10), numbers(rows, kv_heads, length, 10, seed=1),
                 numbers(rows, kv_heads, length, 10, seed=2)], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "queries", "keys"), [(4, 2, 1, 63), (6, 2, 63, 100), (3, 3, 7, 7)])
def test_causal_suffix_attention(heads, kv_heads, queries, keys, dtype):
    assert_same(causal_suffix_attention, causal_attention_reference,
                [numbers(1, heads, queries, 10), numbers(1, kv_heads, keys, 10, seed=1),
                 numbers(1, kv_heads, keys, 10, seed=2)], dtype)


def test_the_suffix_of_causal_attention_is_that_of_the_whole():
    q, k, v = (numbers(1, heads, 9, 10, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    torch.testing.assert_close(causal_suffix_attention(q[:, :, 5:], k, v), causal_attention(q, k, v)[:, :, 5:])


@pytest.mark.parametrize("tokens", [1, 63])
def test_rope_rotates(tokens):
    angles = numbers(tokens, 5, seed=3)
    cos = torch.cat([angles.cos(), angles.cos()], -1)[:, None]
    sin = torch.cat([-angles.sin(), angles.sin()], -1)[:, None]
    assert_same(lambda x: apply_rope(x, cos, sin), lambda x: apply_rope_reference(x, angles),
                [numbers(tokens, 3, 10)], torch.float64)


def test_rope_on_a_strided_view():
    """Queries and keys are a slice of the fused projection; the rest of it gets no gradient."""
    fused = numbers(7, 5, 4).requires_grad_()
    angles = numbers(7, 2, seed=3)
    cos, sin = torch.cat([angles.cos()] * 2, -1)[:, None], torch.cat([-angles.sin(), angles.sin()], -1)[:, None]
    out = apply_rope(fused[:, :3], cos, sin)
    torch.testing.assert_close(out, apply_rope_reference(fused[:, :3], angles))
    out.sum().backward()
    assert fused.grad[:, 3:].abs().max() == 0 and fused.grad[:, :3].abs().min() > 0
