"""Steps of generation by torch's own operations, on any device and any memory that a stage's weights lie in.

Owns the pages of keys and values, and how packed prompts and decoding sequences attend to them. What a layer computes
is the stage's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridflow.generation.blocks import BLOCK_TOKENS
from hybridflow.generation.graphs import DecodeGraphs
from hybridflow.generation.runner import Chunk, StepBatch
from hybridflow.generation.weight_layout import lay_out_for_decoding
from hybridflow.kernels.attention import causal_suffix_attention
from hybridflow.models.attention import PackedCausal
from hybridflow.models.decoder import DecoderStage
from hybridflow.models.layout import split_heads
from hybridflow.models.rope import RopeKind


class TorchRunner:
    """A `StageRunner` over a `DecoderStage` of one chunk; pages `[2, layers, blocks, 16, kv_heads, head_dim]`."""

    def __init__(self, stage: DecoderStage, device: torch.device, *, owns_weights: bool) -> None:
        """`owns_weights`: the stage's parameters are its own, and may be laid out for decoding."""
        self._stage, self._device, self._owns_weights = stage, device, owns_weights
        self._kv_heads = split_heads(stage.config, stage.tp.size, stage.tp.index).num_kv
        (self._layers,) = stage.chunk_layers.values()
        self._is_last = stage.norm is not None
        self._pages: Tensor | None = None
        self._graphs: DecodeGraphs | None = None

    @property
    def drawer(self) -> None:
        return None

    @property
    def block_bytes(self) -> int:
        return 2 * len(self._layers) * BLOCK_TOKENS * self._kv_heads * self._stage.config.head_dim * \
            self._stage.dtype.itemsize

    def prepare(self) -> None:
        if self._owns_weights:
            lay_out_for_decoding(self._stage)

    def allocate(self, num_blocks: int) -> None:
        shape = 2, len(self._layers), num_blocks + 1, BLOCK_TOKENS, self._kv_heads, self._stage.config.head_dim
        # Zeros, since a masked position still meets a weight of 0, which NaN would survive.
        self._pages = torch.zeros(shape, dtype=self._stage.dtype, device=self._device)
        if self._device.type == "cuda" and self._stage.config.rope.kind is not RopeKind.DYNAMIC:  # it asks the host
            self._graphs = DecodeGraphs(self._forward, scratch_block=num_blocks)

    def release(self) -> None:
        self._pages = self._graphs = None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            source, destination = torch.tensor(pairs, device=self._device).unbind(1)
            self._pages[:, :, destination] = self._pages[:, :, source]

    def run(self, batch: StepBatch, x: Tensor | None) -> Tensor:
        return self._forward(batch, x) if batch.chunks or self._graphs is None else self._graphs.run(batch, x)

    def _forward(self, batch: StepBatch, x: Tensor | None) -> Tensor:
        attend = PagedAttend(self._pages, self._layers, batch)
        hidden = self._stage.forward_hidden(batch.ids if x is None else x, batch.positions.long(), attend)
        return hidden[batch.sampled] if self._is_last else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._stage.logits(hidden)


class PagedAttend:
    """`models.attention.Attend` over pages: writes each layer's keys and values, then lets the step's tokens attend."""

    def __init__(self, pages: Tensor, layers: range, batch: StepBatch) -> None:
        self._keys, self._values = pages.flatten(2, 3).unbind(0)  # [layers, cells, kv_heads, head_dim]
        self._first_layer = layers.start
        tables = batch.tables.long()
        positions, slots = batch.positions.long(), batch.slots.long()
        blocks = tables[slots, positions // BLOCK_TOKENS]
        self._cells = blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS  # [tokens]
        n = self._num_decode = batch.num_decode
        self._rows = _Rows(tables[slots[:n]], positions[:n]) if n else None
        self._prompts = _Prompts([chunk for chunk in batch.chunks if chunk.start == 0], positions.device)
        self._later = [_Later(chunk, tables) for chunk in batch.chunks if chunk.start > 0]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._keys[layer - self._first_layer], self._values[layer - self._first_layer]
        keys[self._cells], values[self._cells] = k, v
        if self._num_decode == len(q):
            return self._rows(q, keys, values)
        out = torch.empty_like(q)
        if self._rows is not None:
            out[: self._num_decode] = self._rows(q[: self._num_decode], keys, values)
        self._prompts(layer, q, k, v, out)
        for chunk in self._later:
            chunk(q, keys, values, out)
        return out


class _Rows:
    """Sequences with one new token each: a rectangle of their cached cells, masked behind each one's end."""

    def __init__(self, tables: Tensor, positions: Tensor) -> None:
        """`tables` `[rows, width]`; `positions` `[rows]` of the new tokens, which are in the cache already."""
        offsets = torch.arange(BLOCK_TOKENS, device=tables.device)
        self._cells = (tables[..., None] * BLOCK_TOKENS + offsets).flatten(1)  # [rows, columns]
        columns = torch.arange(self._cells.shape[1], device=tables.device)
        self._seen = (columns <= positions[:, None])[:, None, None]  # [rows, 1, 1, columns]
        self._cells.masked_fill_(~self._seen[:, 0, 0], 0)

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        k, v = (cells[self._cells].transpose(1, 2) for cells in (keys, values))  # [rows, kv_heads, columns, head_dim]
        return decode_attention(q, k, v, self._seen)


class _Prompts:
    """Prompts from their first token on, which attend to themselves alone: no page is read."""

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self._spans = [slice(chunk.first, chunk.first + chunk.count) for chunk in chunks]
        self._causal = PackedCausal(tuple(chunk.count for chunk in chunks), device) if chunks else None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        if self._causal is None:
            return
        packed = [torch.cat([x[span] for span in self._spans]) for x in (q, k, v)]
        seen = self._causal(layer, *packed).split([span.stop - span.start for span in self._spans])
        for span, part in zip(self._spans, seen, strict=True):
            out[span] = part


class _Later:
    """A chunk behind tokens that are cached."""

    def __init__(self, chunk: Chunk, tables: Tensor) -> None:
        self._span = slice(chunk.first, chunk.first + chunk.count)
        end = chunk.start + chunk.count
        cells = torch.arange(end, device=tables.device)
        self._cells = tables[chunk.slot, cells // BLOCK_TOKENS] * BLOCK_TOKENS + cells % BLOCK_TOKENS

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        row = [x.transpose(0, 1)[None] for x in (q[self._span], keys[self._cells], values[self._cells])]
        out[self._span] = causal_suffix_attention(*row)[0].transpose(0, 1)


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Softmax attention of one query per row.

    The query heads of one key-value head are laid out as its queries, so that nothing is expanded and each key is
    read once.

    Args:
        q: `[rows, heads, head_dim]`; head i uses key-value head `i // (heads / kv_heads)`.
        keys, values: `[rows, kv_heads, columns, head_dim]`.
        seen: bool `[rows, 1, 1, columns]`.

    Returns:
        `[rows, heads, head_dim]`.
    """
    queries = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[-1])  # [rows, kv_heads, heads / kv_heads, head_dim]
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen).reshape(q.shape)
