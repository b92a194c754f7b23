"""Self-attention of one layer on one tensor rank: projections, q/k norms, rotation; and attention over packed rows.

Owns which heads this rank computes and the attention of packed rows. Which rows share a rectangle is `rectangles`', how
scores are computed `kernels.attention`'s; rows cut over a context group are `context_attention`'s; a cache of keys and
values belongs to generation, which passes its own `Attend`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from hybridflow.kernels.attention import causal_attention
from hybridflow.kernels.fused_attention import Families, fused_attention
from hybridflow.kernels.norm import rms_norm
from hybridflow.kernels.rope import apply_rope
from hybridflow.models.config import ModelConfig
from hybridflow.models.layout import split_heads
from hybridflow.models.rectangles import Rectangle, lay_out, rectangles
from hybridflow.models.rope import RopeTables
from hybridflow.models.slots import from_slots, index_on, to_slots
from hybridflow.parallel.collectives import copy_to, gather_tokens
from hybridflow.parallel.linear import ColumnParallelLinear, RowParallelLinear
from hybridflow.parallel.mesh import AxisGroup


class Attend(Protocol):
    """How the queries of a forward see keys and values; `layer` is the layer's index in the whole model."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q` `[tokens, heads, head_dim]`, `k` and `v` `[tokens, kv_heads, head_dim]` -> like `q` (heads of a rank)."""


# What tokens see: by a function of queries, keys and values, or of the projections by `kernels.fused_attention`.
Sight = Attend | Families


class PackedCausal:
    """Attention of a training forward: each row of a packed micro-batch sees itself only.

    Rows of similar length are laid into one rectangle `[rows, heads, longest, head_dim]` with one call of attention,
    padded on the right, where no real query looks; since no loss reads what padding answers, its gradients are exactly
    zero. However many rectangles there are, a tensor is gathered once each way: they follow each other in one buffer.
    Rows of equal length are a view of the packed tokens and are not copied.
    """

    def __init__(self, lengths: tuple[int, ...], device: torch.device) -> None:
        self.rectangles = rectangles(lengths)
        self.slots: Tensor | None = None  # [tokens] the slot of each; None where they are 0, 1, 2, ...
        if len(set(lengths)) > 1:
            tokens, slots = lay_out(lengths, self.rectangles)
            self.tokens, self.slots = index_on(device, tokens), index_on(device, slots)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(self.rectangles, self._cut(q), self._cut(k), self._cut(v), strict=True)
        seen = [_attend(rectangle, *part) for rectangle, *part in parts]
        flat = seen[0] if len(seen) == 1 else torch.cat(seen)
        return flat if self.slots is None else from_slots(flat, self.slots)

    def _cut(self, x: Tensor) -> tuple[Tensor, ...]:
        """`[tokens, heads, head_dim] -> [slots, heads, head_dim]` of each rectangle."""
        flat = x if self.slots is None else to_slots(x, self.tokens, self.slots)
        # Views of one storage: where layouts are dropped and made again, the first call of attention makes them all.
        return (flat,) if len(self.rectangles) == 1 else flat.split([each.slots for each in self.rectangles])


def _attend(rectangle: Rectangle, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`[slots, heads, head_dim]` of one rectangle."""
    shape = len(rectangle.rows), rectangle.longest
    out = causal_attention(*(x.reshape(*shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)))
    return out.transpose(1, 2).reshape(q.shape)


class RMSNorm(nn.Module):
    """`kernels.norm.rms_norm`, or another `operation` like it, with its weight `[size]`, the same on every tensor rank.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.operation: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(x, self.weight, self.eps)


class ReplicatedKeyValue(nn.Module):
    """Query, key and value projections where several tensor ranks hold the same key-value heads.

    Keys and values have their own parameter, because only its gradient is summed over the ranks that replicate it.
    The input is gathered once for both.
    """

    def __init__(self, hidden_size: int, q_size: int, kv_size: int, *, bias: bool, tp: AxisGroup,
                 sequence_parallel: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        alone = AxisGroup((tp.ranks[tp.index],), 0, None)
        self.q, self.kv = (ColumnParallelLinear(hidden_size, size, bias=bias, tp=alone, sequence_parallel=False,
                                                dtype=dtype, device=device) for size in (q_size, kv_size))

    def forward(self, x: Tensor) -> Tensor:
        x = gather_tokens(x, self.tp) if self.sequence_parallel else copy_to(x, self.tp)
        return torch.cat([self.q(x), self.kv(x)], dim=1)


class Attention(nn.Module):
    """This rank's heads of one layer. Input and output `[tokens, hidden]`, or `[tokens/tp, hidden]` under sequence
    parallelism."""

    def __init__(self, config: ModelConfig, layer: int, *, tp: AxisGroup, sequence_parallel: bool, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__()
        self.layer = layer
        self.heads = split_heads(config, tp.size, tp.index)
        self.head_dim = config.head_dim
        self.rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = apply_rope
        q_size, kv_size = self.heads.num_q * config.head_dim, 2 * self.heads.num_kv * config.head_dim
        shared = dict(tp=tp, sequence_parallel=sequence_parallel, dtype=dtype, device=device)
        if self.heads.kv_replicas == 1:
            self.qkv = ColumnParallelLinear(config.hidden_size, q_size + kv_size, bias=config.qkv_bias, **shared)
        else:
            self.qkv = ReplicatedKeyValue(config.hidden_size, q_size, kv_size, bias=config.qkv_bias, **shared)
        self.out = RowParallelLinear(q_size, config.hidden_size, bias=config.o_bias, **shared)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device) if config.qk_norm else None for _ in range(2))

    def forward(self, x: Tensor, rope: RopeTables, sight: Sight) -> Tensor:
        return self.out(self.see(self.qkv(x), rope, sight))

    def see(self, qkv: Tensor, rope: RopeTables, sight: Sight) -> Tensor:
        """Projections `[tokens, (q + 2 kv) head_dim]` -> what each token sees `[tokens, q head_dim]`."""
        num_q, num_kv = self.heads.num_q, self.heads.num_kv
        if isinstance(sight, Families):
            assert self.q_norm is None, "a norm stands between projection and rotation"
            return fused_attention(qkv, rope.cos, rope.signed_sin, sight, num_q, num_kv)
        qkv = qkv.unflatten(1, (-1, self.head_dim))  # [tokens, q + 2 kv, head_dim]
        qk, v = qkv.split([num_q + num_kv, num_kv], dim=1)
        if self.q_norm is None:
            q, k = self.rotate(qk, rope.cos, rope.signed_sin).split([num_q, num_kv], dim=1)
        else:
            q, k = qk.split([num_q, num_kv], dim=1)
            q = self.rotate(self.q_norm(q), rope.cos, rope.signed_sin)
            k = self.rotate(self.k_norm(k), rope.cos, rope.signed_sin)
        return sight(self.layer, q, k, v).flatten(1)
