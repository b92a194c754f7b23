"""Log-probabilities with the bits that a sampler gives them: from whole rows of logits, by the sampler's own function.

Owns that forward; the backward is `vocab.TokenLogProbs`'s. Costs an all-gather of the logits over `tp`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridflow.kernels import native_rows
from hybridflow.parallel.collectives import all_reduce
from hybridflow.parallel.linear import Product
from hybridflow.parallel.mesh import AxisGroup
from hybridflow.parallel.vocab import TokenLogProbs, gather_columns, local_rows, row_slices, vocab_range


def invariant_logits(hidden: Tensor, weight: Tensor, tp: AxisGroup, vocab_size: int, product: Product) -> Tensor:
    """`vocab.gather_logits` by `product`, whose result must be fp32 or better."""
    with torch.no_grad():
        return gather_columns(product(hidden, weight, None), tp, vocab_size)


def invariant_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    tp: AxisGroup,
    vocab_size: int,
    product: Product,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`vocab.token_log_probs` by `product` and `native_rows.log_probs`; the entropy is right to rounding only."""
    return _InvariantLogProbs.apply(hidden, weight, targets, tp, vocab_size, product, temperature, with_entropy)


class _InvariantLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        tp: AxisGroup,
        vocab_size: int,
        product: Product,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        start, end = vocab_range(vocab_size, tp.size, tp.index)
        log_probs, normalisers, entropies = [], [], []
        for rows in row_slices(hidden.shape[0], vocab_size, hidden.device):
            local = product(hidden[rows], weight, None)  # [rows, vocab/tp]
            logits, wanted = gather_columns(local, tp, vocab_size), targets[rows]
            log_probs.append(native_rows.log_probs(logits, wanted, temperature))
            normalisers.append(logits.gather(1, wanted[:, None])[:, 0].div_(temperature).sub_(log_probs[-1]))
            if with_entropy:
                log_p = local.div_(temperature).sub_(normalisers[-1][:, None])
                entropies.append(log_p.exp().mul_(log_p).sum(1).neg_())
        log_prob, normaliser = torch.cat(log_probs), torch.cat(normalisers)
        entropy = all_reduce(torch.cat(entropies), tp) if with_entropy else torch.zeros_like(log_prob)
        ctx.save_for_backward(hidden, weight, *local_rows(targets, start, end), normaliser, entropy)
        ctx.tp, ctx.temperature, ctx.logits = tp, temperature, None
        ctx.set_materialize_grads(False)
        return log_prob, entropy if with_entropy else None

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, *_ = TokenLogProbs.backward(ctx, grad_log_prob, grad_entropy)
        return grad_hidden, grad_weight, None, None, None, None, None, None
