"""Attention of responses that share a prompt: each sees the prompt, which is packed once, and itself.

Owns which branches are computed together and the keys that they see. Rows and prompts are `attention.PackedCausal`'s,
scores are `kernels.attention`'s.

The keys of a prompt are copied before those of each of its branches, so that one call of attention with a causal edge
gives a whole rectangle of branches. Two calls, whose softmaxes are then merged by their log-sums, would copy nothing,
but no attention of torch gives a gradient to log-sums, and keys of grouped heads are few beside all else of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hybridflow.kernels.attention import causal_suffix_attention
from hybridflow.micro_batch import Branches
from hybridflow.models.attention import PackedCausal
from hybridflow.models.rectangles import Rectangle, lay_out, rectangles
from hybridflow.models.slots import from_slots, index_on, repeat_rows, to_slots


@dataclass(frozen=True)
class Bundle:
    """A rectangle of branches whose prompts have equally many tokens.

    Attributes:
        rectangle: of branches, by number.
        roots: the prompts, each once.
        owners: for each row of the rectangle the place of its prompt in `roots`.
    Example: `Bundle(Rectangle((0, 1, 2), 4), (0, 2), (0, 0, 1))` of branches of 4, 4 and 3 tokens to rows 0, 0 and 2.
    """

    rectangle: Rectangle
    roots: tuple[int, ...]
    owners: tuple[int, ...]


def bundles(lengths: Sequence[int], branches: Branches) -> tuple[Bundle, ...]:
    """All branches to prompts of `lengths`, in as few rectangles of similar ones as `rectangles` makes for each length
    of a prompt.
    """
    found = []
    for length in sorted({lengths[root] for root in branches.roots}):
        mine = [number for number, root in enumerate(branches.roots) if lengths[root] == length]
        for cut in rectangles([branches.lengths[number] for number in mine]):
            rows = tuple(mine[row] for row in cut.rows)
            roots = tuple(dict.fromkeys(branches.roots[number] for number in rows))
            owners = tuple(roots.index(branches.roots[number]) for number in rows)
            found.append(Bundle(Rectangle(rows, cut.longest), roots, owners))
    return tuple(found)


class BranchCausal:
    """Attention of a training forward in which some rows go on in several branches; an `attention.Attend`.

    Args:
        lengths: tokens of the rows that begin at position 0, prompts of branches among them; they are packed first.
        branches: packed behind them.
    """

    def __init__(self, lengths: tuple[int, ...], branches: Branches, device: torch.device) -> None:
        self.rows = PackedCausal(lengths, device)
        self.sizes = [sum(lengths), sum(branches.lengths)]
        self.bundles = bundles(lengths, branches)
        cut = [bundle.rectangle for bundle in self.bundles]
        tokens, slots = lay_out(branches.lengths, cut)
        self.slots: Tensor | None = None  # [tokens of branches] the slot of each; None where they are 0, 1, 2, ...
        if not torch.equal(tokens, torch.arange(len(tokens))):
            self.tokens, self.slots = index_on(device, tokens), index_on(device, slots)
        starts = (0, *accumulate(lengths))
        self.places = [index_on(device, torch.cat([torch.arange(starts[root], starts[root + 1])
                                                   for root in bundle.roots])) for bundle in self.bundles]
        self.owners = [index_on(device, torch.tensor(bundle.owners)) for bundle in self.bundles]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (rows_q, q), (rows_k, k), (rows_v, v) = (x.split(self.sizes) for x in (q, k, v))
        seen = [self._attend(number, *parts, rows_k, rows_v)
                for number, parts in enumerate(zip(self._cut(q), self._cut(k), self._cut(v), strict=True))]
        flat = seen[0] if len(seen) == 1 else torch.cat(seen)
        branches = flat if self.slots is None else from_slots(flat, self.slots)
        return torch.cat([self.rows(layer, rows_q, rows_k, rows_v), branches])

    def _cut(self, x: Tensor) -> tuple[Tensor, ...]:
        """`[tokens of branches, heads, head_dim] -> [rows, longest, heads, head_dim]` of each bundle."""
        flat = x if self.slots is None else to_slots(x, self.tokens, self.slots)
        cuts = [bundle.rectangle for bundle in self.bundles]
        parts = flat.split([cut.slots for cut in cuts])
        return tuple(part.unflatten(0, (len(cut.rows), cut.longest)) for cut, part in zip(cuts, parts, strict=True))

    def _attend(self, number: int, q: Tensor, k: Tensor, v: Tensor, rows_k: Tensor, rows_v: Tensor) -> Tensor:
        """`[slots, heads, head_dim]` of one bundle."""
        k, v = (torch.cat([self._prompts(number, before), own], dim=1) for before, own in ((rows_k, k), (rows_v, v)))
        out = causal_suffix_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return out.transpose(1, 2).flatten(0, 1)

    def _prompts(self, number: int, x: Tensor) -> Tensor:
        """`[rows, tokens of a prompt, kv_heads, head_dim]`: for each branch of a bundle its prompt's `x`."""
        prompts = from_slots(x, self.places[number]).unflatten(0, (len(self.bundles[number].roots), -1))
        return repeat_rows(prompts, self.owners[number])
