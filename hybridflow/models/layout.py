"""How a decoder is cut over tensor ranks and chunks (virtual stages): layers of a chunk, heads of a rank, what does not
fit.

Pure arithmetic on a `ModelConfig` and a `Layout`; it knows no tensors and no groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.models.config import ModelConfig
from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.schedules.chunks import Chunks

MOST_SEGMENTS = 8  # a power of two


def chunk_layers(num_layers: int, chunks: Chunks, layers_per_chunk: Sequence[int] | None = None) -> tuple[range, ...]:
    """The layers of each chunk of the model, in order. Without `layers_per_chunk` they are even, what is left going to
    the first chunks (the last one also has the head).

    Example: `chunk_layers(5, Chunks(2)) == (range(0, 3), range(3, 5))`.

    Raises:
        ValueError: too many chunks, or `layers_per_chunk` does not fit.
    """
    faults = _chunk_faults(num_layers, chunks, layers_per_chunk)
    if faults:
        raise ValueError("; ".join(faults))
    count = chunks.count
    counts = layers_per_chunk or [num_layers // count + (chunk < num_layers % count) for chunk in range(count)]
    ends = [sum(counts[:chunk + 1]) for chunk in range(count)]
    return tuple(range(end - count, end) for end, count in zip(ends, counts))


@dataclass(frozen=True)
class HeadSplit:
    """The heads of one tensor rank: half-open ranges of query and of key-value heads.

    `kv_replicas` adjacent ranks hold the same key-value heads (more than one only where tp > num_kv_heads).
    Example: 8 query and 2 kv heads at tp 4: rank 1 has query heads 2-3 and kv head 0, as has rank 0.
    """

    q: tuple[int, int]
    kv: tuple[int, int]
    kv_replicas: int

    @property
    def num_q(self) -> int:
        return self.q[1] - self.q[0]

    @property
    def num_kv(self) -> int:
        return self.kv[1] - self.kv[0]


def split_heads(config: ModelConfig, tp: int, index: int) -> HeadSplit:
    """The heads of tensor rank `index` of `tp` (the layout has passed `check_layout`)."""
    q = config.num_heads // tp
    replicas = max(1, tp // config.num_kv_heads)
    kv = max(1, config.num_kv_heads // tp)
    first = index // replicas * kv
    return HeadSplit((index * q, (index + 1) * q), (first, first + kv), replicas)


def sum_segments(config: ModelConfig, tp: int = 1) -> int:
    """Parts in which one of `tp` ranks sums its share of k in the products that are cut over k (`attention.out` and
    `mlp.down`), so that the bits of a sum do not depend on tp: all ranks together sum the same parts as one alone, in
    the same tree (`parallel.collectives.tree_sum`). Where tp does not divide them (3, 16), each rank has one part: the
    bits are then those of this tp only.

    Example: 8 heads and 704 intermediate features are summed in 8 parts, 4 on each rank of tp 2.
    """
    shared = math.gcd(MOST_SEGMENTS, config.num_heads, config.intermediate_size)
    return shared // tp if shared % tp == 0 else 1


def check_layout(config: ModelConfig, layout: Layout, layers_per_chunk: Sequence[int] | None = None,
                 chunks: Chunks | None = None) -> list[str]:
    """Every reason why the model cannot be cut in this layout; empty where it can. Pure.

    Args:
        layers_per_chunk: None for an even split.
        chunks: None for one chunk on each stage.
    """
    tp = layout.tp
    faults = _chunk_faults(config.num_layers, chunks or Chunks(layout.pp), layers_per_chunk)
    if config.num_heads % config.num_kv_heads:
        faults.append(f"num_kv_heads {config.num_kv_heads} must divide num_heads {config.num_heads}")
    if config.num_heads % tp:
        faults.append(f"tp {tp} must divide num_heads {config.num_heads}: use {_divisors(config.num_heads)}")
    if config.num_kv_heads % tp and tp % config.num_kv_heads:
        faults.append(f"tp {tp} must divide num_kv_heads {config.num_kv_heads} or be a multiple of it")
    if config.intermediate_size % tp:
        faults.append(f"tp {tp} must divide intermediate_size {config.intermediate_size}: "
                      f"use {_divisors(config.intermediate_size, config.num_heads)}")
    if config.vocab_size < tp:
        faults.append(f"tp {tp} must be at most vocab_size {config.vocab_size}")
    return faults


def require_layout(config: ModelConfig, layout: Layout, layers_per_chunk: Sequence[int] | None = None,
                   chunks: Chunks | None = None) -> None:
    """Raises:
        ValueError: all faults of `check_layout` in one message.
    """
    faults = check_layout(config, layout, layers_per_chunk, chunks)
    if faults:
        raise ValueError(f"the model cannot be cut as {layout}: {'; '.join(faults)}")


def _chunk_faults(num_layers: int, chunks: Chunks, layers_per_chunk: Sequence[int] | None) -> list[str]:
    """In the words of the config, where the numbers are `layers_per_stage`."""
    count = f"pp {chunks.pp}" if chunks.vpp == 1 else f"pp {chunks.pp} x vpp {chunks.vpp} = {chunks.count} chunks"
    if layers_per_chunk is None:
        return [] if chunks.count <= num_layers else [f"{count} must be at most num_layers {num_layers}"]
    faults = []
    if len(layers_per_chunk) != chunks.count:
        entries = f"pp = {chunks.pp}" if chunks.vpp == 1 else f"pp x vpp = {chunks.count}"
        faults.append(f"layers_per_stage {list(layers_per_chunk)} must have {entries} entries")
    if sum(layers_per_chunk) != num_layers or min(layers_per_chunk, default=0) < 1:
        faults.append(f"layers_per_stage {list(layers_per_chunk)} must be positive and sum to num_layers {num_layers}")
    return faults


def _divisors(*sizes: int) -> str:
    return ", ".join(str(n) for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes))
