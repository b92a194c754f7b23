"""How token losses become one number: a weight for every token, made once for a whole optimizer batch.

Every loss is `(weight * token_loss).sum()`, and sums of micro-batches and data-parallel ranks add up. The denominators
are global counts known before the first backward, so that no cut of the batch can change a step. Never sees a loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from hybridflow.algorithms.ragged import check_lengths, row_sums, to_tokens


class LossReduction(Enum):
    """What is averaged: tokens, or sequences of token means, of token sums, or of token sums over a fixed length."""

    TOKEN_MEAN = "token-mean"  # DAPO, arXiv:2503.14476, eq. 8
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"  # GRPO, arXiv:2402.03300, eq. 3
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    CONSTANT_LENGTH = "constant-length"  # Dr. GRPO, arXiv:2503.20783, appendix A


@dataclass(frozen=True)
class GlobalCounts:
    """Counts of one optimizer batch, all ranks. `GlobalCounts(tokens=12, sequences=4)`: 12 trained tokens in 4 rows.

    Attributes:
        tokens: trained (masked-in) tokens.
        sequences: rows with at least one trained token.
    """

    tokens: int
    sequences: int


def loss_weights(
    reduction: LossReduction,
    mask: Tensor,
    lengths: tuple[int, ...],
    counts: GlobalCounts,
    *,
    constant_length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`[tokens]`: the factor of each token's loss in the whole optimizer batch; 0 where the token is not trained.

    With m the mask, S the sequences and n_i the trained tokens of row i: token-mean m / sum(m), seq-mean-token-mean
    m / (n_i S), seq-mean-token-sum m / S, constant-length m / (L S).

    Args:
        mask: `[tokens]` non-zero where a token is trained.
        lengths: tokens of each row.
        counts: of the whole optimizer batch, all ranks; all-zero counts give all-zero weights.
        constant_length: L in tokens, for `CONSTANT_LENGTH` only.

    Raises:
        ValueError: the mask does not fit the lengths, or constant_length is missing, not positive or not used.
    """
    check_lengths(mask, lengths, "mask")
    if (constant_length is not None) != (reduction is LossReduction.CONSTANT_LENGTH):
        raise ValueError(
            f"constant_length is {constant_length} with loss reduction {reduction.value}; it is given with "
            f"{LossReduction.CONSTANT_LENGTH.value}, and only there"
        )
    if constant_length is not None and constant_length <= 0:
        raise ValueError(f"constant_length is {constant_length}; it must be positive, for example the response limit")
    trained = (mask != 0).double()
    return (trained / _denominator(reduction, trained, lengths, counts, constant_length)).to(dtype)


def _denominator(
    reduction: LossReduction,
    trained: Tensor,
    lengths: tuple[int, ...],
    counts: GlobalCounts,
    constant_length: int | None,
) -> Tensor | int:
    # Where a count is 0 nothing is trained, and 0 / 1 is the weight that is meant.
    sequences = max(counts.sequences, 1)
    if reduction is LossReduction.TOKEN_MEAN:
        return max(counts.tokens, 1)
    if reduction is LossReduction.SEQ_MEAN_TOKEN_MEAN:
        return to_tokens(row_sums(trained, lengths), lengths).clamp(min=1) * sequences
    if reduction is LossReduction.SEQ_MEAN_TOKEN_SUM:
        return sequences
    assert constant_length is not None
    return sequences * constant_length
