"""CISPO: clipped importance-sampling-weight policy optimisation (MiniMax-M1, 2025, arXiv:2506.13585, section 3.1).

Advantages are GRPO's and the reduction is `token-mean`. PPO's clip drops the gradient of a token whose ratio is out of
bounds; here the ratio is only a weight, clipped and without gradient, of REINFORCE's term: every token keeps its
gradient. The paper has no lower bound (`low` 1) and tunes the upper one, whose value it does not tell.
"""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.kl import bounded_log_ratio
from hybridflow.algorithms.losses import Clip, Sums, given
from hybridflow.algorithms.policy import old_log_probs, summed
from hybridflow.micro_batch import TokenColumns
from hybridflow.target_rows import TargetRows


def cispo_policy_loss(log_probs: Tensor, columns: TokenColumns, rows: TargetRows, clip: Clip) -> tuple[Tensor, Sums]:
    """-sg[clip(r, 1 - low, 1 + high)] A log p of each token (eq. 4-5), with r = exp(log_probs - old).

    Args:
        log_probs: `[targets]` of the policy in training, in nats.
        columns: weight, advantages; old_log_probs, None where the policy has not changed since the rollout.
        rows: not looked at; every token has a ratio of its own.
        clip: the bounds of r; `dual` is not looked at.

    Returns:
        (loss scalar, sums): those of `policy.summed`, ratio (before the clip) and clip_fraction (tokens whose ratio was
        out of bounds).
    """
    ratio = bounded_log_ratio(log_probs.detach(), old_log_probs(log_probs, columns)).exp()
    clipped = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    token_loss = -clipped * given(columns.advantages, "advantages") * log_probs
    return summed(token_loss, log_probs, columns, ratio=ratio, clip_fraction=clipped != ratio)
