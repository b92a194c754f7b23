"""Causal softmax attention over rectangles of rows, with grouped key-value heads. Knows tensors only.

For packed rows without rectangles torch 2.13 has `torch.nn.attention.varlen.varlen_attn`: flash attention on CUDA in 16
bits alone, causal by `window_size=(-1, 0)`, with a backward. It is not used: it has no form for a CPU or for fp32, and
nobody has held it to the reference here.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each position attends to itself and to what is before it (Vaswani et al. 2017, arXiv 1706.03762, eq. 1).

    Args:
        q: `[rows, heads, length, head_dim]`.
        k, v: `[rows, kv_heads, length, head_dim]`; query head i uses key-value head `i // (heads / kv_heads)`.

    Returns:
        `[rows, heads, length, head_dim]`.
    """
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def causal_suffix_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The queries are the last positions of their row, and the keys the whole row up to there.

    Where a GPU has flash attention no mask exists: its causal form is aligned to the lower right corner.

    Args:
        q: `[rows, heads, queries, head_dim]`.
        k, v: `[rows, kv_heads, keys, head_dim]`, keys >= queries; heads are grouped as in `causal_attention`.

    Returns:
        `[rows, heads, queries, head_dim]`.
    """
    if q.is_cuda:
        from torch.nn.attention.bias import causal_lower_right  # brings torch._dynamo: 2 s that few processes need
        aligned = causal_lower_right(q.shape[2], k.shape[2])
    else:
        aligned = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=aligned, enable_gqa=q.shape[1] != k.shape[1])


def causal_attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Both with every score written out, softmax in fp32 or better."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1 + k.shape[2] - q.shape[2])
    return scores.masked_fill(later, -math.inf).softmax(-1).to(v.dtype) @ v
