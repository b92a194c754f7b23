"""Statistics of the rewards within groups: the responses to one prompt. Shared by the algorithms that compare them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupStatistics:
    """Example: rewards 1, 0 and 5 in groups 7, 7 and 3 are centred to 0.5, -0.5 and 0.

    Attributes:
        ids: `[groups]` int64, the group ids in rising order.
        of_row: `[rows]` int64, the place in `ids` of each row's group.
        counts: `[groups]` rows of each, in the dtype of the rewards.
        differs: `[groups]` bool, whether the rewards of a group are not all equal.
        centred: `[rows]` rewards less the mean of their group, exactly 0 where all are equal.
    """

    ids: Tensor
    of_row: Tensor
    counts: Tensor
    differs: Tensor
    centred: Tensor

    def deviations(self) -> Tensor:
        """`[rows]`: the standard deviation of each row's group, with n - 1 in the denominator; 0 in a group of one."""
        squares = torch.zeros_like(self.counts).index_add(0, self.of_row, self.centred.square())
        return (squares / (self.counts - 1).clamp(min=1)).sqrt()[self.of_row]


def group_statistics(row_rewards: Tensor, group_ids: Tensor) -> GroupStatistics:
    """Of row_rewards `[rows]` (none NaN) in the groups group_ids `[rows]` int64: any values, in any order.

    Raises:
        ValueError: the shapes differ.
    """
    if row_rewards.shape != group_ids.shape or row_rewards.dim() != 1:
        raise ValueError(
            f"rewards {tuple(row_rewards.shape)} and group ids {tuple(group_ids.shape)} must both be [rows]"
        )
    ids, of_row = torch.unique(group_ids, return_inverse=True)
    zeros = row_rewards.new_zeros(len(ids))
    counts = zeros.index_add(0, of_row, torch.ones_like(row_rewards))
    centred = row_rewards - (zeros.index_add(0, of_row, row_rewards) / counts)[of_row]
    lowest = zeros.scatter_reduce(0, of_row, row_rewards, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, of_row, row_rewards, "amax", include_self=False)
    differs = lowest != highest
    # Equal rewards differ from their mean by rounding, which dividing by a deviation of rounding would blow up.
    return GroupStatistics(ids, of_row, counts, differs, torch.where(differs[of_row], centred, 0.0))
