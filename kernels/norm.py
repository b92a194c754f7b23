"""Root-mean-square normalisation. Knows tensors only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim (Zhang & Sennrich 2019, arXiv 1910.07467, eq. 4).

    Args:
        x: `[..., size]`; the mean is taken in fp32 or better whatever the dtype.
        weight: `[size]`.
        eps: added to the mean square.
    """
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same, term by term, in fp32 or better; the result has the dtype of `x`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight).to(x.dtype)
