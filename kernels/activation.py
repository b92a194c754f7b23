"""The gated activation of the feed-forward block. Knows tensors only."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` (Shazeer 2020, arXiv 2002.05202, eq. 6).

    Args:
        gate_up: `[..., 2 * size]`, the gate in the first half.

    Returns:
        `[..., size]`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """The same by its definition."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up
