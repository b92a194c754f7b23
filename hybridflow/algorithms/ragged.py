"""Rows of different lengths packed one after another into `[tokens]`: what the other files need to walk such rows.

`lengths` are python ints, one per row, zero allowed. Owns no formula of any paper and never pads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_lengths(x: Tensor, lengths: tuple[int, ...], name: str) -> None:
    """Raise ValueError unless `x` is `[tokens]` with tokens = sum(lengths)."""
    if x.shape != (sum(lengths),):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; rows of lengths {_shown(lengths)} need ({sum(lengths)},)")


def row_of_token(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """`[tokens]` int64: the row that each packed token belongs to. Lengths (2, 0, 1) give [0, 0, 2]."""
    counts = torch.tensor(lengths, dtype=torch.int64, device=device)
    rows = torch.arange(len(lengths), device=device)
    return torch.repeat_interleave(rows, counts, output_size=sum(lengths))


def row_sums(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """`[rows]`: the sum of each row's tokens of x `[tokens]`; 0 for an empty row."""
    check_lengths(x, lengths, "x")
    return x.new_zeros(len(lengths)).index_add(0, row_of_token(lengths, x.device), x)


def to_tokens(row_values: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """`[tokens]`: each row's value of row_values `[rows]` on all of its tokens. Differentiable."""
    if row_values.shape != (len(lengths),):
        raise ValueError(f"row values have shape {tuple(row_values.shape)}; there are {len(lengths)} rows")
    return row_values[row_of_token(lengths, row_values.device)]


def at_last_token(row_values: Tensor, mask: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """`[tokens]`: each row's value of row_values `[rows]` at its last token with mask `[tokens]` non-zero, else 0.

    A row without such a token has no place for its value, which is dropped (it has no loss either).
    """
    check_lengths(mask, lengths, "mask")
    row = row_of_token(lengths, mask.device)
    position = torch.arange(len(row), device=mask.device)
    none = torch.full((len(lengths),), -1, dtype=torch.int64, device=mask.device)
    last = none.scatter_reduce(0, row, torch.where(mask != 0, position, -1), "amax")  # [rows], -1: no such token
    return torch.where(position == last[row], to_tokens(row_values, lengths), 0.0)


def trained_places(mask: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """(places `[trained tokens]` int64 of the tokens whose mask `[tokens]` is non-zero, how many each row has)."""
    check_lengths(mask, lengths, "mask")
    trained = mask != 0
    counts = row_sums(trained.to(torch.int64), lengths)
    return trained.nonzero().squeeze(1), tuple(counts.tolist())


def next_in_row(x: Tensor, lengths: tuple[int, ...], step: int = 1) -> Tensor:
    """`[tokens]`: x of the token `step` places further in the same row, 0 beyond the end of the row."""
    row = row_of_token(lengths, x.device)
    shifted = torch.zeros_like(x)
    shifted[:-step] = torch.where(row[step:] == row[:-step], x[step:], 0.0)
    return shifted


def discounted_suffix_sum(x: Tensor, lengths: tuple[int, ...], factor: float) -> Tensor:
    """y `[tokens]` with y_t = sum over k >= 0 of factor^k x_{t+k} within the row of t.

    The reverse recurrence y_t = x_t + factor y_{t+1}, by doubling: after step j every y_t holds the first 2^j terms of
    its sum, so that rows of n tokens take log2(n) vector operations (Hillis and Steele 1986) and no padding.
    """
    y = x
    step = 1
    while step < max(lengths, default=0):
        y = y + factor * next_in_row(y, lengths, step)
        factor, step = factor * factor, 2 * step
    return y


def _shown(lengths: tuple[int, ...]) -> str:
    return str(lengths) if len(lengths) <= 8 else f"({', '.join(map(str, lengths[:8]))}, ...)"
