"""Attention over rows that are cut over the ranks of a context group, and the choice between that and whole rows.

Keys and values are all-gathered, as in the training of Llama 3 (arXiv 2407.21783, section 3.3.2). A ring of
point-to-point steps would hide the transfer behind the scores and hold one part of the keys at a time. It would also
take size steps of merging partial softmaxes, with causal work that changes from step to step, where one gather leaves
each piece a plain causal attention that a flash kernel does at once and ragged rows need no special case. Keys and
values of grouped heads are few beside queries, and scores grow with the square of the length while the transfer grows
with the length, so what a ring hides is small where context parallelism is worth having. Recomputing attention in
backward drops the gathered keys and values of every layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.context import ContextCut, ContextPart
from hybridflow.kernels.attention import causal_suffix_attention
from hybridflow.kernels.fused_attention import Families
from hybridflow.micro_batch import MicroBatch
from hybridflow.models.attention import PackedCausal, Sight
from hybridflow.models.branch_attention import BranchCausal
from hybridflow.models.slots import from_slots, index_on
from hybridflow.parallel.collectives import gather_tokens
from hybridflow.parallel.mesh import AxisGroup


def packed_attention(micro_batch: MicroBatch, cp: AxisGroup, *, fused: bool) -> Sight:
    """How a forward of `micro_batch` sees keys and values; it must have been cut for this rank of `cp`.

    `fused` is by `kernels.fused_attention`, which takes projections as they are.
    """
    assert (micro_batch.part.size, micro_batch.part.index) == (cp.size, cp.index), (micro_batch.part, cp)
    device, lengths, branches = micro_batch.position_ids.device, micro_batch.lengths, micro_batch.branches
    if cp.size > 1:
        return ContextCausal(lengths, micro_batch.part, micro_batch.num_tokens, cp, device)
    if fused:
        return Families.of(lengths, branches.lengths, branches.roots)
    return BranchCausal(lengths, branches, device) if branches.lengths else PackedCausal(lengths, device)


class ContextCausal:
    """Each token of this rank sees what is before it in its row, wherever in the context group that lies.

    Padding sees nothing and nothing sees it: it answers zero, and its gradients are exactly zero. Every call is
    collective over `cp`, and so is its backward, on a rank without any token of a row too.

    Args:
        lengths: tokens of each whole row.
        num_tokens: of each rank, with its padding.
    """

    def __init__(self, lengths: tuple[int, ...], part: ContextPart, num_tokens: int, cp: AxisGroup,
                 device: torch.device) -> None:
        cut = ContextCut(lengths, part.size)
        self.lengths, self.cp = lengths, cp
        self.pieces = cut.pieces(part.index)
        sizes = [len(piece) for row in self.pieces for piece in row]
        self.num_real = sum(sizes)
        self.sizes = [*sizes, num_tokens - self.num_real]
        owner, place = cut.places()
        # [tokens of all rows] where each lies in what is gathered.
        self.order = index_on(device, owner * num_tokens + place)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gathered = gather_tokens(torch.cat([k, v], dim=1), self.cp)  # [size x tokens, 2 kv_heads, head_dim]
        rows = from_slots(gathered, self.order)  # [tokens of all rows, 2 kv_heads, head_dim]
        *queries, padding = q.split(self.sizes)
        zeros = torch.zeros_like(padding)
        if self.num_real == 0:
            # Backward must reach queries, keys and values as on every other rank, and keep `rows` as attention does:
            # where kept tensors are made again, every rank gathers again.
            return zeros + (rows[:0].square().sum() + padding[:0].sum())
        return torch.cat([*self._answers(queries, rows), zeros])

    def _answers(self, queries: list[Tensor], rows: Tensor) -> list[Tensor]:
        """For each piece that has tokens, what its queries see of their row."""
        answers, pieces = [], iter(queries)
        for row, spans in zip(rows.split(self.lengths), self.pieces, strict=True):
            k, v = row.chunk(2, dim=1)
            answers += [_attend(piece, k[:span.stop], v[:span.stop]) for span, piece in zip(spans, pieces) if span]
        return answers


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`[queries, heads, head_dim]` of the last of the keys `[keys, kv_heads, head_dim]`."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return causal_suffix_attention(q, k, v).squeeze(0).transpose(0, 1)
