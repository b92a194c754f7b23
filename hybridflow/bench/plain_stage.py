"""A pipeline stage of plain torch modules, and micro-batches for it: the model that every rival of a benchmark runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """One size of the model. Example: `Shape("tiny", hidden=32, layers=1, tokens=16, micro_batches=8)`; `layers` are
    those of one stage, `tokens` those of one micro-batch.
    """

    name: str
    hidden: int
    layers: int
    tokens: int
    micro_batches: int
    heads: int = 2
    vocab: int = 64


@dataclass(frozen=True)
class Tokens:
    """A micro-batch: `input_ids` and `targets` `[tokens]`."""

    input_ids: Tensor
    targets: Tensor


class Block(nn.Module):
    """Causal attention over the micro-batch as one row, and a feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden) for _ in range(2))
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x = x + self.out(attended.transpose(0, 1).flatten(1))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class PlainStage(nn.Module):
    """Ids `[tokens]` (first stage) or hidden states `[tokens, hidden]` -> hidden states; logits on the last stage."""

    def __init__(self, shape: Shape, stage: int, stages: int) -> None:
        super().__init__()
        torch.manual_seed(stage)  # of a process that does nothing else
        self.embed = nn.Embedding(shape.vocab, shape.hidden) if stage == 0 else nn.Identity()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False) if stage == stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def micro_batches(shape: Shape) -> list[Tokens]:
    """The same random micro-batches on every rank."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(shape.vocab, (shape.micro_batches, 2, shape.tokens), generator=generator)
    return [Tokens(*pair.unbind(0)) for pair in ids]


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, summed over tokens."""
    return F.cross_entropy(logits, targets, reduction="sum")
