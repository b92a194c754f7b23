import math

import pytest
import torch

from hybridflow.kernels import native_rows
from hybridflow.kernels.activation import swiglu_reference
from hybridflow.kernels.attention import causal_attention_reference
from hybridflow.kernels.native_build import Unavailable, native_library
from hybridflow.kernels.native_ops import set_threads
from hybridflow.kernels.norm import rms_norm_reference
from hybridflow.kernels.rope import apply_rope

AVAILABLE = native_library()
pytestmark = pytest.mark.skipif(isinstance(AVAILABLE, Unavailable), reason=str(AVAILABLE))
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)


def close(actual, expected, dtype):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@DTYPES
@pytest.mark.parametrize("size", [1, 8, 63, 100, 256])
def test_norm(dtype, size):
    x, weight = normal(5, size, dtype=dtype), normal(size, dtype=dtype, seed=1)
    close(native_rows.rms_norm(x, weight, 1e-5), rms_norm_reference(x.double(), weight.double(), 1e-5), dtype)


@DTYPES
@pytest.mark.parametrize("size", [1, 63, 100])
def test_swiglu(dtype, size):
    x = 4 * normal(3, 2 * size, dtype=dtype)
    x.view(-1)[0] = -200.0
    close(native_rows.swiglu(x), swiglu_reference(x.double()), dtype)


@DTYPES
@pytest.mark.parametrize("head_dim", [2, 8, 50, 128])
def test_rope(dtype, head_dim):
    x, angles = normal(4, 3, head_dim, dtype=dtype), normal(4, head_dim // 2, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = apply_rope(x.double(), torch.cat([cos, cos], 1)[:, None].double(),
                          torch.cat([-sin, sin], 1)[:, None].double())
    close(native_rows.rope(x, cos, sin), expected, dtype)


def attention_by_rows(q, k, v, lengths):
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    outs = [causal_attention_reference(*(x.transpose(0, 1)[None] for x in part)) for part in parts]
    return torch.cat([out[0].transpose(0, 1) for out in outs])


HEADS = [(4, 2, 8), (3, 1, 32), (5, 5, 63), (7, 1, 128), (2, 2, 80)]


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_attention(dtype, heads, kv_heads, head_dim):
    lengths = [1, 15, 16, 17, 70]
    q = 2 * normal(sum(lengths), heads, head_dim, dtype=dtype)
    kv = normal(sum(lengths), 2 * kv_heads, head_dim, dtype=dtype, seed=1)
    k, v = kv.split(kv_heads, dim=1)  # tokens with a stride
    out = native_rows.attention(q, k, v, torch.tensor(lengths))
    close(out, attention_by_rows(q.double(), k.double(), v.double(), lengths), dtype)


@DTYPES
def test_the_bits_of_a_row_do_not_depend_on_others_or_on_threads(dtype):
    lengths = [40, 7, 33]
    q, k, v = (normal(80, heads, 24, dtype=dtype, seed=heads) for heads in (6, 3, 3))
    together = native_rows.attention(q, k, v, torch.tensor(lengths))
    alone = [native_rows.attention(*part, torch.tensor([len(part[0])]))
             for part in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)]
    assert torch.equal(together, torch.cat(alone))
    # heads of one group apart: other neighbours share their loads
    apart = [native_rows.attention(q[:, head:head + 1], k[:, head // 2:head // 2 + 1], v[:, head // 2:head // 2 + 1],
                                   torch.tensor(lengths)) for head in range(6)]
    assert torch.equal(together, torch.cat(apart, 1))
    try:
        set_threads(3)
        assert torch.equal(together, native_rows.attention(q, k, v, torch.tensor(lengths)))
    finally:
        set_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("vocab", [1, 37, 1024, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_log_probs(dtype, vocab, temperature):
    logits, targets = 5 * normal(6, vocab, dtype=dtype), torch.arange(6) * (vocab - 1) // 5
    expected = (logits.double() / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    out = native_rows.log_probs(logits, targets, temperature)
    assert out.dtype == dtype
    close(out, expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("vocab", [37, 3000])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_samples_invert_the_distribution(dtype, vocab, temperature):
    logits = 3 * normal(200, vocab, dtype=dtype)
    uniforms = torch.rand(200, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens, log_probs = native_rows.sample(logits, uniforms, temperature)
    exact = (logits.double() / (temperature or 1.0)).log_softmax(-1)
    running = exact.exp().cumsum(-1)
    drawn = torch.searchsorted(running, (uniforms * running[:, -1])[:, None], right=True)[:, 0]
    assert torch.equal(tokens, logits.argmax(-1) if temperature == 0 else drawn)
    close(log_probs, exact.gather(1, tokens[:, None])[:, 0], dtype)
    assert torch.equal(log_probs, native_rows.log_probs(logits, tokens, temperature or 1.0))


def test_a_tie_goes_to_the_lowest_token():
    logits = torch.zeros(2, 2100)
    logits[0, [1500, 2050]] = 1.0
    assert native_rows.sample(logits, None, 0.0)[0].tolist() == [1500, 0]


def test_a_token_of_no_probability_is_never_drawn():
    logits = torch.full((4, 3000), -math.inf)
    logits[:, [5, 1030, 2999]] = torch.tensor([0.0, -200.0, 1.0])  # the second underflows
    uniforms = torch.tensor([0.0, 0.2, 0.3, 1 - 2**-53], dtype=torch.float64)
    tokens, log_probs = native_rows.sample(logits, uniforms, 1.0)
    assert tokens.tolist() == [5, 5, 2999, 2999]
    close(log_probs, logits[0].log_softmax(0)[tokens], torch.float32)


def test_rows_without_a_distribution_give_nan():
    logits = torch.zeros(4, 1100)
    logits[0, 1050], logits[1], logits[2, 3] = math.nan, -math.inf, math.inf
    for temperature in (0.0, 1.0):
        tokens, log_probs = native_rows.sample(logits, torch.full((4,), 0.5, dtype=torch.float64), temperature)
        assert log_probs.isnan().tolist() == [True, True, True, False]
        assert tokens.ge(0).all() and tokens.lt(1100).all()


def test_a_row_samples_the_same_in_any_company():
    logits, uniforms = 3 * normal(5, 4000, dtype=torch.float32), torch.linspace(0, 0.99, 5, dtype=torch.float64)
    tokens, log_probs = native_rows.sample(logits, uniforms, 1.0)
    try:
        for threads in (1, 2, 3):
            set_threads(threads)
            for row in range(5):
                alone = native_rows.sample(logits[row:row + 1], uniforms[row:row + 1], 1.0)
                assert (alone[0].item(), alone[1].item()) == (tokens[row].item(), log_probs[row].item())
    finally:
        set_threads(1)
