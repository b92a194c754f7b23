"""Decode steps as CUDA graphs: one launch for all the kernels of a forward.

Owns the captured graphs and the fixed memory that they read. What is captured is the runner's forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.generation.runner import StepBatch

FINE_ROWS = 8  # sizes are powers of two up to here, multiples of it beyond
RUNS_BEFORE_CAPTURE = 2  # plain ones: they warm up libraries, and a size that is met once is not worth a graph


@dataclass(frozen=True)
class Captured:
    """A graph of a fixed number of rows and columns of tables, with what it reads and what it makes."""

    graph: torch.cuda.CUDAGraph
    batch: StepBatch
    x: Tensor | None
    hidden: Tensor


class DecodeGraphs:
    """Runs steps without prompt tokens, padded up to one of few sizes, from graphs captured on the way.

    Padding rows read and write a block of their own. Graphs hold addresses of weights and pages: drop this object when
    either moves.
    """

    def __init__(self, forward: Callable[[StepBatch, Tensor | None], Tensor], scratch_block: int) -> None:
        """`forward`: without host synchronisation, and without memory of what it was called with."""
        self._forward, self._scratch_block = forward, scratch_block
        self._captured: dict[tuple[int, int], Captured] = {}
        self._runs: dict[tuple[int, int], int] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, batch: StepBatch, x: Tensor | None) -> Tensor:
        """`forward` of a step whose tokens are one per sequence, all of them sampled; `[rows, hidden]`."""
        rows, size = batch.num_decode, (padded_rows(batch.num_decode), padded_width(batch.tables.shape[1]))
        self._runs[size] = self._runs.get(size, 0) + 1
        if self._runs[size] <= RUNS_BEFORE_CAPTURE:
            return self._forward(batch, x)
        if size not in self._captured:
            self._captured[size] = self._capture(*size, batch, x)
        captured = self._captured[size]
        fill(captured.batch, batch, self._scratch_block)
        if x is not None:
            captured.x[:rows] = x
        captured.graph.replay()
        return captured.hidden[:rows]

    def _capture(self, rows: int, width: int, like: StepBatch, like_x: Tensor | None) -> Captured:
        fixed = fixed_batch(rows, width, like, self._scratch_block)
        x = None if like_x is None else like_x.new_zeros(rows, like_x.shape[1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = self._forward(fixed, x)
        return Captured(graph, fixed, x, hidden)


def padded_rows(rows: int) -> int:
    """`padded_rows(3) == 4`, `padded_rows(33) == 40`."""
    return 1 << (rows - 1).bit_length() if rows <= FINE_ROWS else -(-rows // FINE_ROWS) * FINE_ROWS


def padded_width(width: int) -> int:
    """The next power of two: a rectangle is read to its end, but only where it is not masked."""
    return 1 << (width - 1).bit_length()


def fixed_batch(rows: int, width: int, like: StepBatch, scratch_block: int) -> StepBatch:
    """A step of `rows` sequences on `scratch_block`, on the device and in the dtypes of `like`. Slot i is row i."""
    places = torch.arange(rows, device=like.ids.device)
    return StepBatch(rows, (), like.ids.new_zeros(rows), like.positions.new_zeros(rows), places.to(like.slots.dtype),
                     like.tables.new_full((rows, width), scratch_block), places.to(like.sampled.dtype))


def fill(fixed: StepBatch, batch: StepBatch, scratch_block: int) -> None:
    """Put a step into the memory of a fixed one of at least its size; what is left over becomes padding."""
    rows, width = batch.num_decode, batch.tables.shape[1]
    fixed.ids[:rows], fixed.positions[:rows], fixed.positions[rows:] = batch.ids, batch.positions, 0
    fixed.tables[:rows, :width] = batch.tables[batch.slots.long()]
    fixed.tables[rows:] = scratch_block
