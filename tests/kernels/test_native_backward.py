"""The trainer's C++ kernels against the operations of torch that they stand for, with odd sizes."""

from __future__ import annotations

import pytest
import torch

from hybridflow.kernels import native_backward
from hybridflow.kernels.activation import swiglu_reference
from hybridflow.kernels.attention import causal_attention_reference
from hybridflow.kernels.fused_attention import Families, fused_attention
from hybridflow.kernels.native_build import NativeLibrary, native_library
from hybridflow.kernels.norm import rms_norm_reference
from hybridflow.kernels.rope import apply_rope_reference

pytestmark = pytest.mark.skipif(not isinstance(native_library(), NativeLibrary), reason="no native kernels here")
DTYPES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def gradients(fn, given: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of `fn` in fp64, by autograd."""
    wide = [x.double().requires_grad_() for x in inputs]
    out = fn(*wide)
    return (out.detach(), *torch.autograd.grad(out, wide, given.double()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 16, 37])
def test_swiglu(dtype, size):
    gate_up, given = drawn(5, 2 * size, dtype=dtype), drawn(5, size, dtype=dtype)
    _, expected = gradients(swiglu_reference, given, gate_up)
    close(native_backward.swiglu_backward(given, gate_up), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 32, 100])
def test_norm(dtype, size):
    x, weight, given = drawn(7, size, dtype=dtype), drawn(size, dtype=dtype), drawn(7, size + 1, dtype=dtype)[:, :size]
    out, scales = native_backward.rms_norm(x, weight, 1e-5)
    expected = gradients(lambda x, w: rms_norm_reference(x, w, 1e-5), given, x, weight)
    for found, wanted in zip((out, *native_backward.rms_norm_backward(given, x, weight, scales)), expected):
        close(found, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 32, 50])
def test_rotation_there_and_back(dtype, size):
    angles = drawn(3, size // 2, dtype=torch.float64)
    cos, sin = (torch.cat([sign * part, part], 1)[:, None].to(dtype)
                for part, sign in ((angles.cos(), 1), (angles.sin(), -1)))
    x = drawn(3, 5, size, dtype=dtype)[:, 1:4]  # heads that lie together, tokens that do not
    turned = native_backward.rotate(x, cos, sin)
    close(turned, apply_rope_reference(x.double(), angles), dtype)
    close(native_backward.rotate(turned, cos, sin, back=True), x.double(), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("vocab", [1, 64, 131])
def test_logits(dtype, given, vocab):
    logits, targets = drawn(6, vocab, dtype=dtype) * 9, torch.arange(6) % vocab
    mine, factor = torch.arange(6) != 2, 1 / 0.7

    def head(logits):
        log_p = (logits * factor).log_softmax(1)
        return torch.stack([log_p.gather(1, targets[:, None])[:, 0] * mine, -(log_p.exp() * log_p).sum(1)])

    columns = torch.stack([drawn(6, dtype=dtype) * wanted for wanted in given])
    columns[0, 2] = 0  # of a target that another rank has only the softmax's part would be here
    out, expected = gradients(head, columns, logits)
    peaks, (total, weighted, target) = native_backward.logit_statistics(logits, factor, targets, mine)
    entropy = total.log() - weighted / total
    close(torch.where(mine, target - total.log(), 0), out[0], dtype)
    close(entropy, out[1], dtype)
    found = native_backward.logit_gradients_(logits.clone(), factor, targets, mine, peaks + total.log(), entropy,
                                             *(column if wanted else None for column, wanted in zip(columns, given)))
    close(found, expected, dtype)


def test_a_nan_among_logits_is_seen():
    for place in (0, 63, 64):
        logits = torch.zeros(2, 65).index_put((torch.tensor(1), torch.tensor(place)), torch.tensor(torch.nan))
        peaks, sums = native_backward.logit_statistics(logits, 1.0, torch.tensor([3, 3]), torch.tensor([True, True]))
        assert sums[0, 0] == 65 and not torch.isfinite(peaks[1] + sums[0, 1].log())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 6), (3, 1, 32), (2, 2, 40)])
def test_attention_of_rows_and_branches(dtype, heads, kv_heads, size):
    lengths, branches, roots = (3, 40, 1), (5, 70, 1, 33), (0, 1, 1, 0)
    found = Families.of(lengths, branches, roots)
    tokens = sum(lengths) + sum(branches)
    angles = drawn(tokens, size // 2, dtype=torch.float64)
    cos, sin = (torch.cat([sign * part, part], 1)[:, None].to(dtype)
                for part, sign in ((angles.cos(), 1), (angles.sin(), -1)))
    qkv, given = drawn(tokens, (heads + 2 * kv_heads) * size, dtype=dtype), drawn(tokens, heads * size, dtype=dtype)
    expected = gradients(lambda qkv: _attention(qkv, angles, found, heads, kv_heads), given, qkv)
    mine = qkv.clone().requires_grad_()
    out = fused_attention(mine, cos, sin, found, heads, kv_heads)
    close(out.detach(), expected[0], dtype)
    close(*torch.autograd.grad(out, mine, given), expected[1], dtype)


def _attention(qkv, angles, families, heads, kv_heads):
    """Every row and branch alone."""
    q, k, v = qkv.unflatten(1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], 1)
    q, k = apply_rope_reference(q, angles), apply_rope_reference(k, angles)
    out, first = torch.zeros_like(q), 0
    for end in families.ends.tolist():
        (start, length), *rest = families.segments[first:end].tolist()
        root, first = torch.arange(start, start + length), end
        for own in (root, *(torch.arange(start, start + length) for start, length in rest)):
            row = own if own is root else torch.cat([root, own])
            seen = causal_attention_reference(*(x[row].transpose(0, 1)[None] for x in (q, k, v)))[0].transpose(0, 1)
            out = out.index_put((own,), seen[-len(own):])
    return out.flatten(1)
