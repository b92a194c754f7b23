"""What every advantage estimator is given and gives back, and whitening by global moments.

The estimators are one file an algorithm beside this one; `registry` lists them. Nothing here knows a model, a process
group or a config, and nothing carries a gradient: inputs come from forward passes without autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.ragged import check_lengths, to_tokens, trained_places

Total = Callable[[Tensor], Tensor]


def of_one_process(x: Tensor) -> Tensor:
    """The total over ranks where there is one."""
    return x


@dataclass(frozen=True)
class AdvantageOptions:
    """Numbers that estimators may read. Example: `AdvantageOptions(gamma=1.0, lam=0.95)`.

    Attributes:
        gamma, lam: discount and trace decay, each in [0, 1].
        std_normalise: divide a group's advantages by the deviation of its rewards.
        multiplier: lambda of Safe-RLHF in this step, at least 0.
    """

    gamma: float = 1.0
    lam: float = 0.95
    std_normalise: bool = True
    multiplier: float = 0.0


@dataclass(frozen=True)
class Rewarded:
    """Responses with their rewards. Row data is that of ALL rows of the batch, on every rank; token data that of my
    rows, packed one after another.

    Attributes:
        row_rewards: `[rows]` fp64, the score less the row's KL penalty where one is charged; NaN where the reward
            failed: such a row is not trained and counts in no mean.
        groups: `[rows]` int64, equal for the responses to one prompt. Groups are complete.
        mine: which rows' tokens are here, in the order of the tokens.
        lengths: response tokens of each of my rows; 0 is allowed.
        mask: `[tokens]` 1.0 where a token is trained. Other tokens (of failed rows, or that the policy did not sample)
            are in no sum, and chains over time go on at the next trained token.
        token_rewards: `[tokens]` KL penalties at their tokens, and the score at each row's last trained token.
        values: `[tokens]` of the critic; None without one.
        baselines: `[rows]` fp64, the reward of the greedy answer to the row's prompt (ReMax); None without.
        cost: the same rows as a cost model judges them, with the cost critic's values (Safe-RLHF); None without.
        total: adds a tensor up over all ranks, for statistics over the tokens of the whole batch. Collective.

    Example: two answers of 2 and 1 tokens to one prompt, of which this rank has the second, are
    `Rewarded(row_rewards=[1, 0], groups=[0, 0], mine=(1,), lengths=(1,), mask=[1], token_rewards=[0])` as tensors.
    """

    row_rewards: Tensor
    groups: Tensor
    mine: tuple[int, ...]
    lengths: tuple[int, ...]
    mask: Tensor
    token_rewards: Tensor
    values: Tensor | None = None
    baselines: Tensor | None = None
    cost: Rewarded | None = None
    total: Total = of_one_process

    def on_tokens(self, row_values: Tensor) -> Tensor:
        """`[tokens]`: each row's value of row_values `[rows]` on its trained tokens that are here, 0 on the others."""
        mine = row_values[list(self.mine)].to(self.token_rewards.dtype)
        return torch.where(self.mask != 0, to_tokens(mine, self.lengths), 0.0)

    def chained(self, *columns: Tensor) -> tuple[tuple[int, ...], list[Tensor]]:
        """Columns `[tokens]` as if there were only trained tokens: (the number of these in each row, the columns)."""
        for column in columns:
            check_lengths(column, self.lengths, "a column")
        places, lengths = trained_places(self.mask, self.lengths)
        return lengths, [column[places] for column in columns]

    def unchained(self, column: Tensor) -> Tensor:
        """`[tokens]`: a column of trained tokens in its places again, 0 on the other tokens."""
        places, _ = trained_places(self.mask, self.lengths)
        return torch.zeros_like(self.mask, dtype=column.dtype).index_copy(0, places, column)


@dataclass(frozen=True)
class Estimate:
    """What an estimator says of my tokens.

    Attributes:
        advantages: `[tokens]`, 0 where a token is not trained.
        returns: `[tokens]` that the critic is trained towards; None without a critic.
        cost_returns: `[tokens]` for the cost critic (Safe-RLHF); None without one.
    """

    advantages: Tensor
    returns: Tensor | None = None
    cost_returns: Tensor | None = None


Estimator = Callable[[Rewarded, AdvantageOptions], Estimate]
RowFormula = Callable[[Tensor, Tensor], Tensor]


def over_scored_rows(rewarded: Rewarded, formula: RowFormula) -> Estimate:
    """One number a row, on all of its trained tokens: `formula(rewards, groups)` of the rows that have a reward."""
    known = ~rewarded.row_rewards.isnan()
    rows = torch.zeros_like(rewarded.row_rewards)
    rows[known] = formula(rewarded.row_rewards[known], rewarded.groups[known])
    return Estimate(rewarded.on_tokens(rows))


def moment_sums(x: Tensor, mask: Tensor) -> Tensor:
    """`[3]` fp64: number, sum and sum of squares of the tokens of x `[tokens]` where mask `[tokens]` is non-zero.

    Sums of different ranks add up; `mean_and_variance` reads them. fp64, because the variance is a difference of sums.
    """
    kept = torch.where(mask != 0, x, 0.0).double()
    return torch.stack([(mask != 0).sum().double(), kept.sum(), kept.square().sum()])


def mean_and_variance(sums: Tensor) -> tuple[float, float]:
    """(mean, biased variance) of the tokens counted in `moment_sums`; (0, 0) when there is none."""
    count, total, squares = sums.tolist()
    if count == 0:
        return 0.0, 0.0
    mean = total / count
    return mean, max(squares / count - mean * mean, 0.0)


def whiten(x: Tensor, mask: Tensor, *, mean: float, variance: float, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + eps) where mask `[tokens]` is non-zero, else 0.

    The moments are those of all tokens of all ranks, so that neither the number of ranks nor a cut of the batch shows
    in the result (normalisation of advantages: Andrychowicz et al. 2021, arXiv:2006.05990, section 3.5).
    """
    return torch.where(mask != 0, (x - mean) / (variance + eps) ** 0.5, 0.0)
