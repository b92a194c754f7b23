"""Tensors to the C++ kernels of rows: norm, rotation, activation, attention of packed rows, log-probs and sampling.

Owns the checks of shapes and dtypes before a pointer leaves Python. Each gives a token the bits that a step of
generation gives it, whatever stands beside it: a trainer that computes with these agrees with generation exactly.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int, c_long, c_void_p
from functools import cache

import torch
from torch import Tensor

from hybridflow.kernels.native_ops import DTYPES, library_with

POINTER, LONG = c_void_p, c_long
SIGNATURES = {
    "hf_rms_norm": [c_int, POINTER, LONG, LONG, POINTER, c_double, POINTER],
    "hf_rope": [c_int, POINTER, LONG, LONG, LONG, POINTER, POINTER, POINTER],
    "hf_swiglu": [c_int, POINTER, LONG, LONG, POINTER],
    "hf_attention": [c_int, *[POINTER, LONG] * 3, POINTER, LONG, LONG, LONG, LONG, POINTER],
    "hf_sample": [c_int, POINTER, LONG, LONG, LONG, POINTER, c_double, POINTER, POINTER],
    "hf_log_probs": [c_int, POINTER, LONG, LONG, LONG, POINTER, c_double, POINTER],
}


@cache
def rows_library() -> ctypes.CDLL:
    """The library with the signatures of rows.cpp declared.

    Raises:
        RuntimeError: it cannot be built here.
    """
    return library_with(SIGNATURES)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`kernels.norm.rms_norm`: `x` `[..., size]`, `weight` `[size]`, rounded once from fp32 or better."""
    assert weight.shape == x.shape[-1:] and weight.dtype == x.dtype, (x.shape, weight.shape, x.dtype, weight.dtype)
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    rows_library().hf_rms_norm(DTYPES[x.dtype], x.data_ptr(), x.numel() // x.shape[-1], x.shape[-1], weight.data_ptr(),
                               eps, out.data_ptr())
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Every head rotated by its token's angles (Su et al. 2021, arXiv 2104.09864, eq. 34).

    Args:
        x: `[tokens, heads, head_dim]`; the halves of a head are the rotated pairs.
        cos, sin: `[tokens, head_dim / 2]` of the dtype of `x`.
    """
    tokens, heads, size = x.shape
    assert cos.shape == sin.shape == (tokens, size // 2) and cos.dtype == sin.dtype == x.dtype, (x.shape, cos.shape)
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    rows_library().hf_rope(DTYPES[x.dtype], x.data_ptr(), tokens, heads, size, cos.data_ptr(), sin.data_ptr(),
                           out.data_ptr())
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """`kernels.activation.swiglu`: `[..., 2 * size] -> [..., size]`."""
    gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    rows_library().hf_swiglu(DTYPES[gate_up.dtype], gate_up.data_ptr(), gate_up.numel() // (2 * size), size,
                             out.data_ptr())
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Causal attention within packed rows (Vaswani et al. 2017, arXiv 1706.03762, eq. 1).

    Args:
        q: `[tokens, heads, head_dim]`.
        k, v: `[tokens, kv_heads, head_dim]`; query head i uses key-value head `i // (heads / kv_heads)`.
        lengths: int64 `[rows]` that sum to tokens.

    Returns:
        like `q`.
    """
    heads, head_dim = q.shape[1:]
    assert k.shape == v.shape and k.shape[::2] == q.shape[::2] and heads % k.shape[1] == 0, (q.shape, k.shape, v.shape)
    assert lengths.dtype == torch.int64 and lengths.sum() == len(q), (lengths, q.shape)
    q, k, v = (x if _heads_together(x) else x.contiguous() for x in (q, k, v))
    lengths, out = lengths.contiguous(), q.new_empty(q.shape)
    rows_library().hf_attention(DTYPES[q.dtype], q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(),
                                v.stride(0), lengths.data_ptr(), len(lengths), heads, k.shape[1], head_dim,
                                out.data_ptr())
    return out


def _heads_together(x: Tensor) -> bool:
    """Whether a token's heads lie one after another, as in a view of a fused projection."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def log_probs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-prob `[rows]` of each of `targets` (int64 `[rows]`) under softmax(logits / temperature), as of `sample`.

    Args:
        logits: `[rows, vocab]` fp32 or fp64, like the result.

    Raises:
        ValueError: a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be > 0 to score tokens (0 means greedy, for sampling only)")
    rows, vocab = logits.shape
    assert targets.shape == (rows,) and targets.dtype == torch.int64 and logits.dtype != torch.bfloat16, targets.shape
    logits, targets = _rows_of(logits), targets.contiguous()
    out = logits.new_empty(rows)
    rows_library().hf_log_probs(DTYPES[logits.dtype], logits.data_ptr(), rows, vocab, logits.stride(0),
                                targets.data_ptr(), temperature, out.data_ptr())
    return out


def sample(logits: Tensor, uniforms: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    """One token a row by the inverse of the cumulative distribution; never one of probability 0.

    Args:
        logits: `[rows, vocab]` fp32 or fp64.
        uniforms: float64 `[rows]` in [0, 1); None where temperature is 0, which takes the lowest of the highest logits.
        temperature: divides the logits.

    Returns:
        tokens int64 `[rows]`; their log-probs `[rows]` over the whole vocabulary under the temperature (1 when greedy),
        in the dtype of the logits. A row with a NaN, or without a finite logit, gives some token and NaN.
    """
    rows, vocab = logits.shape
    assert logits.dtype in (torch.float32, torch.float64), logits.dtype
    assert uniforms is None or (uniforms.shape == (rows,) and uniforms.dtype == torch.float64), uniforms
    assert uniforms is not None or temperature == 0, temperature
    logits = _rows_of(logits)
    tokens, chosen = torch.empty(rows, dtype=torch.int64), logits.new_empty(rows)
    drawn = None if uniforms is None else uniforms.contiguous()
    rows_library().hf_sample(DTYPES[logits.dtype], logits.data_ptr(), rows, vocab, logits.stride(0),
                             None if drawn is None else drawn.data_ptr(), temperature, tokens.data_ptr(),
                             chosen.data_ptr())
    return tokens, chosen


def _rows_of(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
