"""The loss of direct preference optimisation, and its variants of one line.

Plain functions of log-ratios of rows. They divide by nothing: whoever adds the pairs up knows how many there are.
"""

from __future__ import annotations

from enum import Enum

import torch.nn.functional as F
from torch import Tensor


class DpoLoss(Enum):
    """How the difference of two log-ratios becomes a loss."""

    SIGMOID = "sigmoid"  # Rafailov et al. 2023, arXiv:2305.18290, eq. 7
    IPO = "ipo"  # Azar et al. 2023, arXiv:2310.12036, eq. 17


def dpo(chosen: Tensor, rejected: Tensor, beta: float, loss: DpoLoss = DpoLoss.SIGMOID,
        label_smoothing: float = 0.0) -> Tensor:
    """The loss of each pair, with h = chosen - rejected.

    sigmoid: -log sigmoid(beta h) (DPO, arXiv:2305.18290, eq. 7); with label smoothing e (the chance that a pair is the
    wrong way round; conservative DPO, Mitchell 2023, "A note on DPO with noisy preferences")
    -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h). ipo: (h - 1 / (2 beta))^2 (arXiv:2310.12036, eq. 17, beta
    is its tau).

    Args:
        chosen, rejected: `[pairs]` log pi(y | x) - log pi_ref(y | x) of whole responses, in nats.
        beta: weight of the KL to the reference, in units of the implied reward per nat; above 0.
        label_smoothing: e, in [0, 0.5); of no effect on ipo.

    Returns:
        `[pairs]`.
    """
    ahead = chosen - rejected
    if loss is DpoLoss.IPO:
        return (ahead - 1 / (2 * beta)).square()
    right = -F.logsigmoid(beta * ahead)
    if label_smoothing == 0:
        return right
    return (1 - label_smoothing) * right - label_smoothing * F.logsigmoid(-beta * ahead)
