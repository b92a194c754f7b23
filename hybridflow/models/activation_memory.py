"""Bytes of activations that a rank keeps for the backward of a micro-batch, by arithmetic alone.

Owns the formulas, by layer, head and chunk, and their peak over a schedule. They count what autograd holds between
forward and backward with a flash kernel of attention; not the loss's own columns, weights, gradients, the few logits
that a CPU keeps (`vocab.KEPT_LOGITS`), nor what a kernel needs while it runs. Tests hold them to what a CPU keeps, byte
for byte, but for context parallelism, where a CPU has no flash kernel and keeps scores too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hybridflow.micro_batch import MicroBatch
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.layout import split_heads
from hybridflow.models.recompute import Recompute
from hybridflow.models.rectangles import rectangles
from hybridflow.parallel.schedules.actions import Kind, Schedule

INDEX_BYTES = 8  # int64


@dataclass(frozen=True)
class PackedShape:
    """The sizes of a micro-batch on one rank.

    Attributes:
        lengths: tokens of each whole row.
        num_tokens: of this rank, with padding.
        num_targets: of this rank.
    Example: two rows of 5 and 3 tokens with 4 response tokens: `PackedShape((5, 3), 8, 4)`.
    """

    lengths: tuple[int, ...]
    num_tokens: int
    num_targets: int

    @classmethod
    def of(cls, micro_batch: MicroBatch) -> PackedShape:
        return cls(micro_batch.lengths, micro_batch.input_ids.shape[0], micro_batch.targets.shape[0])

    @property
    def is_ragged(self) -> bool:
        return len(set(self.lengths)) > 1

    @property
    def slots(self) -> int:
        """Tokens of the rectangles that attention lays the rows into, with their padding."""
        return sum(rectangle.slots for rectangle in rectangles(self.lengths))


@dataclass(frozen=True)
class ActivationMemory:
    """What the chunks of a decoder keep on one rank; every method gives bytes.

    Attributes:
        recompute_layers: `recompute` holds for the first so many layers of each chunk; None is all.
        cp: the context group's size. More than one rank keeps the keys and values of all tokens.
        fused: attention is one kernel from the projections on (`kernels.fused_attention`): nothing is laid out.
    """

    config: ModelConfig
    head: Head
    dtype: torch.dtype
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = Recompute.NONE
    recompute_layers: int | None = None
    fused: bool = False

    def chunk(self, shape: PackedShape, num_layers: int, *, is_first: bool, is_last: bool) -> int:
        """A chunk of `num_layers` layers, with the input that came from the chunk before; and the embedding of the
        first, the norm and the head of the last."""
        again = num_layers if self.recompute_layers is None else min(num_layers, self.recompute_layers)
        kept = again * self.layer(shape, self.recompute) + (num_layers - again) * self.layer(shape, Recompute.NONE)
        kept += self._shared_by_layers(shape, holds_attend=again > 0 and self.recompute is not Recompute.NONE)
        kept += self._embedding(shape) if is_first else 0
        return kept + (self._head(shape) if is_last else 0)

    def peaks(self, schedule: Schedule, shapes: Sequence[PackedShape],
              chunk_layers: Sequence[range]) -> tuple[int, ...]:
        """The most that each stage holds at once over `schedule` with these micro-batches. A backward under way needs
        one layer more, `layer(shape, Recompute.NONE)`, where it is recomputed.

        Args:
            chunk_layers: of every chunk of the model (`layout.chunk_layers`).
        """
        def kept(i: int, chunk: int) -> int:
            return self.chunk(shapes[i], len(chunk_layers[chunk]), is_first=chunk == 0,
                              is_last=chunk == schedule.chunks.last)

        return stage_peaks(schedule, kept, lambda i, chunk: self.weight_inputs(shapes[i], len(chunk_layers[chunk])))

    def layer(self, shape: PackedShape, recompute: Recompute) -> int:
        """One layer, with its input."""
        stream = self._local_tokens(shape) * self.config.hidden_size * self._size
        if recompute is Recompute.FULL:
            return stream
        normed = self._norms_out(shape) if recompute is Recompute.NONE else 0
        norms = 2 * (stream + self._local_tokens(shape) * self._wide) + 2 * normed
        inner = self.config.intermediate_size // self.tp
        gate_up = (2 if recompute is Recompute.SELECTIVE else 3) * inner  # the third is the output of SwiGLU
        return norms + self._attention(shape, recompute) + shape.num_tokens * gate_up * self._size

    def weight_inputs(self, shape: PackedShape, num_layers: int) -> int:
        """What a chunk keeps between the B and the W of a split backward, whatever is recomputed: of each linear its
        input and the gradient of its output."""
        q, kv, _ = self._widths
        inner, hidden = self.config.intermediate_size // self.tp, self.config.hidden_size
        inputs, grads = 2 * hidden + q + inner, (q + 2 * kv) + 2 * inner + 2 * hidden
        return num_layers * shape.num_tokens * (inputs + grads) * self._size

    def _attention(self, shape: PackedShape, recompute: Recompute) -> int:
        """From the fused projection to the input of the output projection."""
        q, kv, num_heads = self._widths
        if self.fused:
            # The projection, attention's output, and of each softmax a peak and a sum.
            return shape.num_tokens * ((2 * q + 2 * kv) * self._size + 2 * num_heads * self._wide)
        n, is_laid_out = shape.num_tokens, self.cp == 1 and shape.is_ragged
        slots = shape.slots if is_laid_out else n
        seen = slots * (q * self._size + num_heads * self._wide)  # attention's output and log-sums
        copied = n * q * self._size if is_laid_out or self.cp > 1 else 0  # the output, packed again
        scales = 0 if not self.config.qk_norm else n * (q + kv) // self.config.head_dim * self._wide
        projected = n * (q + 2 * kv) * self._size
        if recompute is Recompute.SELECTIVE:
            return seen + copied + scales + projected
        if self.cp > 1:
            rotated = n * q + sum(shape.lengths) * 2 * kv + (0 if self.config.qk_norm else n * kv)
        else:
            rotated = slots * (q + 2 * kv) if is_laid_out else n * (q + kv)
        # Values that are a view of the projection keep all of it, and so do queries of a norm.
        holds_projection = self.config.qk_norm or not (is_laid_out or self.cp > 1)
        return seen + copied + scales + rotated * self._size + (projected if holds_projection else 0)

    def _shared_by_layers(self, shape: PackedShape, holds_attend: bool) -> int:
        """The tables of the rotation, and places of tokens where rows are laid out."""
        tables = 2 * shape.num_tokens * self.config.head_dim * self._size
        if self.fused:
            return tables
        if self.cp > 1:
            return tables + sum(shape.lengths) * INDEX_BYTES
        if not shape.is_ragged:
            return tables
        return tables + (shape.num_tokens + (shape.slots if holds_attend else 0)) * INDEX_BYTES

    def _embedding(self, shape: PackedShape) -> int:
        """Where the vocabulary is cut: local rows, and which of them are another rank's."""
        return 0 if self.tp == 1 else shape.num_tokens * (INDEX_BYTES + 1)

    def _head(self, shape: PackedShape) -> int:
        hidden = self.config.hidden_size
        norm = self._local_tokens(shape) * (hidden * self._size + self._wide)
        if self.head is not Head.LANGUAGE_MODEL:
            weight = 0 if self._wide == self._size else hidden * self._wide
            return norm + shape.num_targets * hidden * self._wide + weight
        return norm + shape.num_targets * (hidden * self._size + INDEX_BYTES + 1 + 2 * self._wide)

    def _norms_out(self, shape: PackedShape) -> int:
        """The input of a column-parallel linear, gathered where the tokens are cut."""
        return shape.num_tokens * self.config.hidden_size * self._size

    def _local_tokens(self, shape: PackedShape) -> int:
        return shape.num_tokens // self.tp if self.sequence_parallel else shape.num_tokens

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Of one tensor rank: query features, key features, query heads."""
        heads, dim = split_heads(self.config, self.tp, 0), self.config.head_dim
        return heads.num_q * dim, heads.num_kv * dim, heads.num_q

    @property
    def _size(self) -> int:
        return self.dtype.itemsize

    @property
    def _wide(self) -> int:
        """Statistics are in fp32 at least."""
        return torch.promote_types(self.dtype, torch.float32).itemsize


def stage_peaks(schedule: Schedule, kept: Callable[[int, int], int],
                weight_inputs: Callable[[int, int], int] = lambda micro_batch, chunk: 0) -> tuple[int, ...]:
    """The most activation bytes that each stage holds at once while it runs `schedule`.

    Args:
        kept: of (micro-batch, chunk): bytes from its F to its B.
        weight_inputs: of (micro-batch, chunk): bytes from its B to its W, where backwards are split.

    Example: with `kept=lambda i, c: 1` 1F1B on 4 stages holds `(4, 3, 2, 1)`.
    """
    peaks = []
    for actions in schedule.stages:
        now = peak = 0
        for action in actions:
            place = action.index, action.chunk
            if action.kind is Kind.F:
                now += kept(*place)
            elif action.kind is Kind.B:
                now += (weight_inputs(*place) if schedule.splits_backward else 0) - kept(*place)
            elif action.kind is Kind.W:
                now -= weight_inputs(*place)
            peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)
