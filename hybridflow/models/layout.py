"""How a decoder is cut over tensor ranks and pipeline stages: layers of a stage, heads of a rank, what does not fit.

Pure arithmetic on a `ModelConfig` and a `Layout`; it knows no tensors and no groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.models.config import ModelConfig
from hybridflow.parallel.mesh import Layout


def stage_layers(num_layers: int, pp: int, layers_per_stage: Sequence[int] | None = None) -> tuple[range, ...]:
    """The layers of each stage. Without `layers_per_stage` they are even, what is left going to the first stages (the
    last one also has the head). Example: `stage_layers(5, 2) == (range(0, 3), range(3, 5))`.

    Raises:
        ValueError: `layers_per_stage` does not fit.
    """
    faults = _stage_faults(num_layers, pp, layers_per_stage)
    if faults:
        raise ValueError("; ".join(faults))
    counts = layers_per_stage or [num_layers // pp + (stage < num_layers % pp) for stage in range(pp)]
    ends = [sum(counts[:stage + 1]) for stage in range(pp)]
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


def check_layout(config: ModelConfig, layout: Layout, layers_per_stage: Sequence[int] | None = None) -> list[str]:
    """Every reason why the model cannot be cut in this layout; empty where it can. Pure."""
    tp = layout.tp
    faults = _stage_faults(config.num_layers, layout.pp, layers_per_stage)
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


def require_layout(config: ModelConfig, layout: Layout, layers_per_stage: Sequence[int] | None = None) -> None:
    """Raises:
        ValueError: all faults of `check_layout` in one message.
    """
    faults = check_layout(config, layout, layers_per_stage)
    if faults:
        raise ValueError(f"the model cannot be cut as {layout}: {'; '.join(faults)}")


def _stage_faults(num_layers: int, pp: int, layers_per_stage: Sequence[int] | None) -> list[str]:
    if layers_per_stage is None:
        return [] if pp <= num_layers else [f"pp {pp} must be at most num_layers {num_layers}"]
    faults = []
    if len(layers_per_stage) != pp:
        faults.append(f"layers_per_stage {list(layers_per_stage)} must have pp = {pp} entries")
    if sum(layers_per_stage) != num_layers or min(layers_per_stage, default=0) < 1:
        faults.append(f"layers_per_stage {list(layers_per_stage)} must be positive and sum to num_layers {num_layers}")
    return faults


def _divisors(*sizes: int) -> str:
    return ", ".join(str(n) for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes))
