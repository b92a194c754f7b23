"""How the decoder attends while generating: a prefill of packed prompts, and steps of one token per row.

Each strategy is handed to the decoder's forward as `attend(layer, q, k, v)`, q `[tokens, heads, head_dim]`, k and v
`[tokens, kv_heads, head_dim]`, all heads local. It owns no storage: that is `kv_cache`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridflow.generation.admission import SharedPrompt
from hybridflow.generation.kv_cache import PromptCells, RowGroup
from hybridflow.models.attention import PackedCausal


class PrefillAttend:
    """Causal attention within each packed prompt; its keys and values also go to the caches.

    Prompts of one group have similar lengths, so a rectangle of each group wastes little.
    """

    def __init__(self, groups: Sequence[RowGroup], runs: Sequence[Sequence[SharedPrompt]],
                 device: torch.device) -> None:
        """`runs`: the distinct prompts of each group, in packed order."""
        self._parts: list[tuple[RowGroup, PromptCells, slice, PackedCausal]] = []
        start = 0
        for group, run in zip(groups, runs, strict=True):
            lengths = tuple(len(prompt.ids) for prompt in run)
            cells = group.prompt_cells(lengths, [len(prompt.requests) for prompt in run])
            span = slice(start, start + sum(lengths))
            self._parts.append((group, cells, span, PackedCausal(lengths, device)))
            start = span.stop

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs = []
        for group, cells, span, causal in self._parts:
            outputs.append(causal(layer, q[span], k[span], v[span]))
            group.write_prompts(layer, cells, k[span], v[span])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class DecodeAttend:
    """Each row's one query attends to the row's cache and itself. Tokens are the groups' rows, group after group."""

    def __init__(self, groups: Sequence[RowGroup]) -> None:
        self._groups = groups

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(self._groups) == 1:
            return decode_attention(q, *self._groups[0].append(layer, k, v))
        sizes = [group.rows for group in self._groups]
        parts = zip(self._groups, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        return torch.cat([decode_attention(q, *group.append(layer, k, v)) for group, q, k, v in parts])


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Softmax attention of one query per row.

    The query heads of one key-value head are laid out as its queries, so that nothing is expanded and each key is
    read once.

    Args:
        q: `[rows, heads, head_dim]`; head i uses key-value head `i // (heads / kv_heads)`.
        keys, values: `[rows, kv_heads, columns, head_dim]`.
        bias: added to the scores, `[rows, 1, 1, columns]`; None adds nothing.

    Returns:
        `[rows, heads, head_dim]`.
    """
    queries = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[-1])  # [rows, kv_heads, heads / kv_heads, head_dim]
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias).reshape(q.shape)
