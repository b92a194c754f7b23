"""GSPO: group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071).

Advantages are GRPO's. The importance ratio is that of a whole response, its length-normalised likelihood ratio, and so
is the clipping: a response is in or out with all of its tokens. GSPO-token has the same ratio and lets advantages
differ within a response. The paper's reduction is `seq-mean-token-mean`: each response counts once (eq. 5), whose terms
are the same for all of its tokens. Its bounds are 3e-4 and 4e-4 (section 5.1): the mean of many log-ratios is small.
"""

from __future__ import annotations

from torch import Tensor

from hybridflow.algorithms.kl import LOG_RATIO_BOUND
from hybridflow.algorithms.losses import Clip, Sums, given
from hybridflow.algorithms.policy import clipped_surrogate, old_log_probs, summed
from hybridflow.micro_batch import TokenColumns
from hybridflow.target_rows import TargetRows


def sequence_log_ratios(log_probs: Tensor, columns: TokenColumns, rows: TargetRows) -> Tensor:
    """`[rows]`: log s_i (eq. 7), the mean of log_probs - old over the trained tokens of each row, all parts of it; 0
    where a row has none. Differentiable; within +-LOG_RATIO_BOUND. Ranks with parts of the same rows call it alike.
    """
    log_ratios = log_probs - old_log_probs(log_probs, columns)
    return rows.means(log_ratios, given(columns.weight, "weight")).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def gspo_policy_loss(log_probs: Tensor, columns: TokenColumns, rows: TargetRows, clip: Clip) -> tuple[Tensor, Sums]:
    """max(-A s_i, -A clip(s_i, 1 - low, 1 + high)) on every token of row i (eq. 5-7), negated, to be minimised.

    Args:
        log_probs: `[targets]` of the policy in training, in nats.
        columns: weight, advantages; old_log_probs, None where the policy has not changed since the rollout.
        rows: the row of each target.
        clip: the bounds of s_i; `dual` is not looked at.

    Returns:
        (loss scalar, sums): those of `policy.summed`, ratio and clip_fraction, both of s_i and over tokens.
    """
    ratio = rows.to_targets(sequence_log_ratios(log_probs, columns, rows).exp())
    token_loss, clipped = clipped_surrogate(ratio, given(columns.advantages, "advantages"), clip)
    return summed(token_loss, log_probs, columns, ratio=ratio, clip_fraction=clipped)


def gspo_token_policy_loss(log_probs: Tensor, columns: TokenColumns, rows: TargetRows,
                           clip: Clip) -> tuple[Tensor, Sums]:
    """As `gspo_policy_loss` with s_it = sg[s_i] p_t / sg[p_t] (GSPO-token, section 4.3): the value of s_i on every
    token, whose gradient is that of the token alone. Where a row's advantages are equal and its tokens weigh the same,
    the gradient is GSPO's.
    """
    sequence = sequence_log_ratios(log_probs, columns, rows).detach().exp()
    ratio = rows.to_targets(sequence) * (log_probs - log_probs.detach()).exp()
    token_loss, clipped = clipped_surrogate(ratio, given(columns.advantages, "advantages"), clip)
    return summed(token_loss, log_probs, columns, ratio=ratio, clip_fraction=clipped)
