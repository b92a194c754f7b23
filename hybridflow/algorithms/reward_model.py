"""The loss of a reward model that learns from pairs: Bradley-Terry.

Plain functions of scores of rows. They divide by nothing: whoever adds the pairs up knows how many there are.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, centre_coef: float = 0.0) -> Tensor:
    """-log sigmoid(chosen - rejected - margin) + centre_coef (chosen + rejected)^2 of each pair.

    InstructGPT (Ouyang et al. 2022, arXiv:2203.02155, eq. 1), the margin as in Llama 2 (Touvron et al. 2023,
    arXiv:2307.09288, eq. 2), the centring term of Eisenstein et al. 2023 (arXiv:2312.09244), which holds the scores,
    of which only differences are learned, near 0.

    Args:
        chosen, rejected: `[pairs]` scores, in units of the log-odds that an answer is preferred.
        margin: `[pairs]` by how much the chosen one should be ahead, in the same units; None for 0.
        centre_coef: 0 leaves the centring term out.

    Returns:
        `[pairs]`.
    """
    ahead = chosen - rejected if margin is None else chosen - rejected - margin
    loss = -F.logsigmoid(ahead)
    return loss if centre_coef == 0 else loss + centre_coef * (chosen + rejected).square()
