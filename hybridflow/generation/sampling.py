"""One token per row from its logits: temperature, top-k, top-p and the inverse of the cumulative distribution.

Owns the choice and the log-prob of the chosen token. It knows tensors only: no group, no cache, no random state;
the uniforms come from the caller.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridflow.generation.records import SamplingParams

NUCLEUS_GUESS = 128  # most top-p sets of a trained model are smaller


def sample_tokens(logits: Tensor, uniforms: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    The log-prob is the raw one: over the full vocabulary, under the sampling temperature (1 when greedy), before
    top-k and top-p. It is what the trainer computes for the same token, so that the ratio of PPO starts at 1.

    Args:
        logits: `[rows, vocab]`, any float dtype; computed with in fp32 or better.
        uniforms: float64 `[rows]` in [0, 1); not read when greedy.
        params: temperature, top-k, top-p.

    Returns:
        tokens int64 `[rows]`, log-probs `[rows]` (fp32, or fp64 for fp64 logits). A row without a single finite
        logit gives some valid token and a NaN log-prob.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    temperature = params.temperature or 1.0
    top = logits.amax(-1, keepdim=True)
    weights = logits - top
    if temperature != 1:
        weights /= temperature
    weights.exp_()
    normaliser = weights.sum(-1, keepdim=True)
    if params.temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
    else:
        floor = weight_floor(weights, params)
        drawable = weights if floor is None else weights.mul_(weights >= floor)
        tokens = inverse_cdf(drawable, uniforms).unsqueeze(-1)
    log_probs = (logits.gather(-1, tokens) - top) / temperature - normaliser.log_()
    return tokens.squeeze(-1), log_probs.squeeze(-1)


def weight_floor(weights: Tensor, params: SamplingParams) -> Tensor | None:
    """The smallest weight that may still be drawn, `[rows, 1]`; None where neither top-k nor top-p restricts.

    A floor, not a list of tokens: tokens of equal weight stay in or go out together, whatever the order in which a
    sort would have met them.

    Args:
        weights: `[rows, vocab]`, unnormalised probabilities.
    """
    vocab = weights.shape[-1]
    if params.top_k:
        best = weights.topk(min(params.top_k, vocab)).values  # [rows, k], falling
        total = best.sum(-1, keepdim=True, dtype=torch.float64)
        return best[:, -1:] if params.top_p == 1 else mass_floor(best, params.top_p, total)
    if params.top_p == 1:
        return None
    total = weights.sum(-1, keepdim=True, dtype=torch.float64)
    best = weights.topk(min(NUCLEUS_GUESS, vocab)).values
    # one more wait for the device, but sorting everything takes 5 times as long (32 x 4096 on one core: 10 and 2 ms)
    if bool((best.sum(-1, keepdim=True, dtype=torch.float64) < params.top_p * total).any()):
        best = weights.sort(dim=-1, descending=True).values
    return mass_floor(best, params.top_p, total)


def mass_floor(best: Tensor, share: float, total: Tensor) -> Tensor:
    """The weight, `[rows, 1]`, with which the running sum of `best` `[rows, k]` (falling) reaches `share * total`."""
    before = best.cumsum(-1, dtype=torch.float64) - best
    needed = (before < share * total).sum(-1, keepdim=True)
    return best.gather(-1, (needed - 1).clamp_(min=0))


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The token where the cumulative weight first exceeds `uniform * total`: never one of weight 0.

    In two steps, blocks of about sqrt(vocab) tokens and then tokens of one block, since a running sum over the whole
    vocabulary is serial (3 to 4 times slower at 32 x 4096 on one core). Sums are in fp64.

    Args:
        weights: `[rows, vocab]`, non-negative, at least one positive in each row.
        uniforms: float64 `[rows]` in [0, 1).

    Returns:
        int64 `[rows]`.
    """
    vocab = weights.shape[-1]
    width = 1 << ((vocab - 1).bit_length() + 1) // 2
    if vocab % width:
        weights = F.pad(weights, (0, -vocab % width))
    blocks = weights.unflatten(-1, (-1, width))  # [rows, blocks, width]
    sums = blocks.sum(-1, dtype=torch.float64)
    block, rest = _locate(sums, uniforms.unsqueeze(-1) * sums.sum(-1, keepdim=True))
    inside = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, width)).squeeze(1).to(torch.float64)
    token, _ = _locate(inside, rest)
    # only NaN weights leave the range; their log-prob is NaN, which the engine reports
    return (block * width + token).squeeze(-1).clamp_(max=vocab - 1)


def _locate(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose running sum exceeds `target`, and what of `target` is left there; both `[rows, 1]`."""
    running = weights.cumsum(-1)
    total = running[:, -1:]
    # strictly under the total, so that some index exceeds it however the sums were rounded
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(running, target, right=True).clamp_(max=weights.shape[-1] - 1)
    before = (running - weights).gather(-1, index)
    return index, (target - before).clamp_(min=0)
