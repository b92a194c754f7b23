"""REINFORCE (Williams 1992): the policy loss of RLOO and ReMax, whose advantages are in their own files.

It has no ratio to the policy that sampled, and so it is right where that is the policy in training: one optimizer step
a rollout. With several, `ppo`'s loss bounds what the later ones may do.
"""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.losses import Clip, Sums, given
from hybridflow.algorithms.policy import summed
from hybridflow.micro_batch import TokenColumns
from hybridflow.target_rows import TargetRows


def reinforce_policy_loss(log_probs: Tensor, columns: TokenColumns, rows: TargetRows,
                          clip: Clip) -> tuple[Tensor, Sums]:
    """-A log p of each token (Williams 1992; its sum over a response is the term of RLOO and of ReMax's algorithm 1).

    Args:
        log_probs: `[targets]` of the policy in training, in nats.
        columns: weight, advantages.
        rows, clip: not looked at.

    Returns:
        (loss scalar, sums): those of `policy.summed`.
    """
    return summed(-given(columns.advantages, "advantages") * log_probs, log_probs, columns)
