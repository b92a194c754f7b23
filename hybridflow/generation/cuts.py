"""Which tokens top-k, top-p and min-p leave: a floor under the logits that may still be drawn, one per row.

A floor, not a list of tokens: equal logits stay in or go out together, whatever the order in which a sort would have
met them. Owns the floor, never the draw.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from hybridflow.generation.records import SamplingParams

NUCLEUS_GUESS = 128  # most top-p sets of a trained model are smaller
GUESS_GROWTH = 16
BITS_OF_ONE = {torch.float32: (torch.int32, 30), torch.float64: (torch.int64, 62)}  # no larger weight has more


def logit_floor(logits: Tensor, params: SamplingParams) -> Tensor | None:
    """The smallest logit that may still be drawn, `[rows, 1]`; None where nothing restricts.

    top-k, then top-p of what it left, then min-p, as in transformers. vLLM puts min-p first; that differs where both
    are on, since top-p is then a share of a smaller mass. All are of the distribution under the temperature.

    Args:
        logits: `[rows, vocab]` fp32 or fp64.
    """
    if not params.top_k and params.top_p == 1 and not params.min_p:
        return None
    top, floor = logits.amax(-1, keepdim=True), None
    if params.top_k:
        best = largest(logits, min(params.top_k, logits.shape[-1]))
        floor = best[:, -1:]
        if params.top_p < 1:
            weights = weights_of(best.double(), top, params.temperature)
            floor = best.gather(-1, mass_index(weights, params.top_p, weights.sum(-1, keepdim=True)))
    elif params.top_p < 1:
        floor = nucleus_floor(logits, top, params.temperature, params.top_p)
    if params.min_p:
        least = (top.double() + params.temperature * math.log(params.min_p)).to(logits.dtype)
        floor = least if floor is None else torch.maximum(floor, least)
    return floor


def weights_of(logits: Tensor, top: Tensor, temperature: float) -> Tensor:
    """Unnormalised probabilities, 1 at `top`; new memory."""
    return (logits - top).div_(temperature).exp_()


def largest(logits: Tensor, count: int) -> Tensor:
    """The `count` largest of each row, falling, `[rows, count]`."""
    if logits.device.type != "cpu":
        return logits.topk(count).values
    # numpy's partition and sort are vectorised: 32 x 32000 in fp32 on one core takes 1.8 ms, torch.topk 4.4
    array = logits.numpy()
    if count < array.shape[-1]:
        array = np.partition(array, array.shape[-1] - count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(array, axis=-1)[:, ::-1].copy())


def nucleus_floor(logits: Tensor, top: Tensor, temperature: float, share: float) -> Tensor:
    """The floor `[rows, 1]` of the smallest set of the likeliest tokens that holds `share` of the row."""
    weights = weights_of(logits, top, temperature)
    if logits.device.type != "cpu":
        inside = weights >= bisected_floor(weights, share)
        return torch.where(inside, logits, torch.inf).amin(-1, keepdim=True)
    needed = share * weights.sum(-1, keepdim=True, dtype=torch.float64)
    floor, vocab = torch.empty_like(top), logits.shape[-1]
    left, count = torch.arange(len(logits)), min(NUCLEUS_GUESS, vocab)
    while len(left):  # those whose sets are larger than was guessed
        best = largest(logits[left], count)
        mass = weights_of(best.double(), top[left], temperature)
        floor[left] = best.gather(-1, mass_index(mass, 1.0, needed[left]))
        enough = mass.sum(-1) >= needed[left, 0]
        left, count = left[~enough] if count < vocab else left[:0], min(count * GUESS_GROWTH, vocab)
    return floor


def mass_index(weights: Tensor, share: float, total: Tensor) -> Tensor:
    """Where the running sum of `weights` fp64 `[rows, k]` (falling) reaches `share * total`: int64 `[rows, 1]`."""
    before = weights.cumsum(-1) - weights
    return ((before < share * total).sum(-1, keepdim=True) - 1).clamp_(min=0)


def bisected_floor(weights: Tensor, share: float) -> Tensor:
    """The largest weight such that those that are not smaller hold `share` of the row, `[rows, 1]`, without a sort and
    without waiting for the device: found bit by bit.

    Non-negative floats are ordered as the integers of the same bits; the mass at or above a floor only changes at
    weights, so that the largest floor is one. Each bit costs three passes over the weights; a segmented sort moves
    more, and needs memory of twice the size.

    Args:
        weights: `[rows, vocab]`, none above 1.
    """
    integer, bits = BITS_OF_ONE[weights.dtype]
    needed = share * weights.sum(-1, keepdim=True, dtype=torch.float64)
    floor = torch.zeros(len(weights), 1, dtype=integer, device=weights.device)
    for bit in reversed(range(bits)):
        tried = floor | 1 << bit
        mass = (weights * (weights >= tried.view(weights.dtype))).sum(-1, keepdim=True, dtype=torch.float64)
        floor = torch.where(mass >= needed, tried, floor)
    return floor.view(weights.dtype)
