"""A user's estimator or policy loss tried on an example, before ranks meet: what it must not return is told then.

Owns the examples. A function that raises on them is not judged: it may want what only a run of its algorithm has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hybridflow.algorithms.advantages import AdvantageOptions, Rewarded
from hybridflow.algorithms.losses import Clip
from hybridflow.algorithms.ragged import at_last_token
from hybridflow.algorithms.users_own import UsersEstimator, UsersLoss, WrongReturn
from hybridflow.micro_batch import TokenColumns
from hybridflow.target_rows import TargetRows


def try_estimator(estimator: UsersEstimator) -> None:
    """Two answers to each of two prompts, without a critic. Raises ValueError as `estimator`."""
    rewards, lengths = torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.float64), (2, 1, 3, 2)
    mask = torch.ones(sum(lengths))
    rewarded = Rewarded(rewards, torch.tensor([0, 0, 1, 1]), (0, 1, 2, 3), lengths, mask,
                        at_last_token(rewards.float(), mask, lengths))
    _judged(lambda: estimator(rewarded, AdvantageOptions()))


def try_loss(loss: UsersLoss) -> None:
    """Two rows of three and two targets, after an update; and none, as ranks without the head ask for the names of the
    sums. Raises ValueError as `loss`, or where these names are others.
    """
    old = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0])
    log_probs = (old + torch.tensor([0.1, -0.1, 0.0, 0.05, -0.3])).requires_grad_()
    columns = TokenColumns(weight=torch.full((5,), 0.2), loss_mask=torch.ones(5), rollout_log_probs=old,
                           old_log_probs=old, ref_log_probs=old - 0.1,
                           advantages=torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5]))

    def tried() -> None:
        term, sums = loss(log_probs, columns, TargetRows.of([3, 2]), Clip())
        term.backward()
        nothing = torch.zeros(0, dtype=torch.int64)
        _, of_none = loss(torch.zeros(0), columns.select(nothing), TargetRows(nothing, 0), Clip())
        if sums.keys() != of_none.keys():
            raise WrongReturn(f"{loss.name}: returned the sums {', '.join(sums) or 'none'} of some tokens and "
                              f"{', '.join(of_none) or 'none'} of no tokens; give the same names always")

    _judged(tried)


def _judged(call: Callable[[], Any]) -> None:
    try:
        call()
    except WrongReturn:
        raise
    except Exception:
        return
