"""Attention of a trainer on a CPU, rotation included, straight from a fused projection and back: rows and branches.

Owns the checks of shapes and dtypes before a pointer leaves Python. torch's own attention needs rectangles, keys copied
for each branch, and six passes over queries and keys around it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hybridflow.kernels.native_ops import COMPUTE, DTYPES, library_with

POINTER, LONG = c_void_p, c_long
SHARED = [c_int, POINTER, LONG, LONG, LONG, LONG, POINTER, POINTER, POINTER, POINTER, LONG, LONG]
SIGNATURES = {"hf_fused_attention": [*SHARED, POINTER, POINTER],
              "hf_fused_attention_backward": [*SHARED, *[POINTER] * 3]}


@dataclass(frozen=True)
class Families:
    """Which tokens see which. Example: two answers of 3 and 2 tokens to a prompt of 4 are one family, with `segments`
    [[0, 4], [4, 3], [7, 2]] and `ends` [3].

    Attributes:
        segments: int64 `[rows and branches, 2]`, where each starts and its tokens: a row, then the branches of it.
        ends: int64 `[rows]`, where the segments of each row and its branches end.
    """

    segments: Tensor
    ends: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], branch_lengths: Sequence[int] = (), roots: Sequence[int] = ()) -> Families:
        """Of packed rows of these lengths, and branches packed behind them that go on from rows `roots`."""
        starts = (0, *accumulate((*lengths, *branch_lengths)))
        families = [[(starts[row], length)] for row, length in enumerate(lengths)]
        for number, (length, root) in enumerate(zip(branch_lengths, roots, strict=True)):
            families[root].append((starts[len(lengths) + number], length))
        segments = [segment for family in families for segment in family]
        return cls(torch.tensor(segments, dtype=torch.int64).view(-1, 2),
                   torch.tensor(list(accumulate(map(len, families))), dtype=torch.int64))


def fused_attention(qkv: Tensor, cos: Tensor, signed_sin: Tensor, families: Families, heads: int,
                    kv_heads: int) -> Tensor:
    """Causal attention of rotated queries and keys (`kernels.rope`, `kernels.attention`), in which a branch sees all of
    its row too.

    Args:
        qkv: `[tokens, (heads + 2 kv_heads) head_dim]`, queries, keys and values.
        cos, signed_sin: `[tokens, 1, head_dim]`, as `apply_rope` takes them.
        families: of all tokens.

    Returns:
        `[tokens, heads * head_dim]`.
    """
    return _FusedAttention.apply(qkv, cos, signed_sin, families, heads, kv_heads)


@cache
def attention_library() -> ctypes.CDLL:
    """The library with the signatures declared.

    Raises:
        RuntimeError: it cannot be built here.
    """
    return library_with(SIGNATURES)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, signed_sin: Tensor, families: Families, heads: int,
                kv_heads: int) -> Tensor:
        qkv, tokens = qkv.contiguous(), qkv.shape[0]
        size = qkv.shape[1] // (heads + 2 * kv_heads)
        assert cos.shape == signed_sin.shape == (tokens, 1, size) and cos.dtype == signed_sin.dtype == qkv.dtype
        assert int(families.segments[:, 1].sum()) == tokens and heads % kv_heads == size % 2 == 0, (tokens, heads, size)
        out, softmax = qkv.new_empty(tokens, heads * size), torch.empty(2, tokens, heads, dtype=COMPUTE[qkv.dtype])
        ctx.shape = heads, kv_heads, size
        ctx.families = families
        ctx.save_for_backward(qkv, cos.contiguous(), signed_sin.contiguous(), softmax)
        attention_library().hf_fused_attention(*_arguments(ctx, *ctx.to_save[:3]), out.data_ptr(), softmax.data_ptr())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, signed_sin, softmax = ctx.saved_tensors
        grad, grad_qkv = grad.contiguous(), torch.empty_like(qkv)
        attention_library().hf_fused_attention_backward(
            *_arguments(ctx, qkv, cos, signed_sin), softmax.data_ptr(), grad.data_ptr(), grad_qkv.data_ptr())
        return grad_qkv, None, None, None, None, None


def _arguments(ctx: Any, qkv: Tensor, cos: Tensor, signed_sin: Tensor) -> tuple[int, ...]:
    """What forward and backward begin with."""
    families: Families = ctx.families
    return (DTYPES[qkv.dtype], qkv.data_ptr(), qkv.stride(0), *ctx.shape, cos.data_ptr(), signed_sin.data_ptr(),
            families.segments.data_ptr(), families.ends.data_ptr(), len(families.ends),
            qkv.shape[0])
