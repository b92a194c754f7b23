"""What a user's estimator or policy loss gives back, looked at before anything is computed with it.

Ours are tested; these have never run before. What they must not return is a ValueError that names the key of the
config and the function, on the first batch that shows it: a loss that is not finite would else be a skipped step, and
one without a gradient a run that learns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.advantages import AdvantageOptions, Estimate, Rewarded
from hybridflow.algorithms.losses import Clip, Sums
from hybridflow.micro_batch import TokenColumns
from hybridflow.target_rows import TargetRows


class WrongReturn(ValueError):
    """A user's function returned what it must not."""


@dataclass(frozen=True)
class UsersEstimator:
    """Example: `UsersEstimator("algorithm.advantage = mine.py:best", best)`, called as `best` would be."""

    name: str
    function: Callable[..., Any]

    def __call__(self, rewarded: Rewarded, options: AdvantageOptions) -> Estimate:
        """
        Raises:
            WrongReturn: what the function returned is no Estimate with a finite number for each of these tokens, or has
                nothing for a critic that there is.
        """
        estimate = self.function(rewarded, options)
        if not isinstance(estimate, Estimate):
            raise WrongReturn(f"{self.name}: returned {_kind(estimate)}; it must return an Estimate, for example "
                              "Estimate(advantages)")
        needed = {"advantages": True, "returns": rewarded.values is not None, "cost_returns": rewarded.cost is not None}
        for column, is_needed in needed.items():
            values = vars(estimate)[column]
            if values is not None:
                self._require_tokens(column, values, rewarded)
            elif is_needed:
                raise WrongReturn(f"{self.name}: returned no {column}, and there is a critic to be trained towards "
                                  f"them; give Estimate(advantages, {column}=...)")
        return estimate

    def _require_tokens(self, column: str, values: object, rewarded: Rewarded) -> None:
        wanted = tuple(rewarded.mask.shape)
        if not isinstance(values, Tensor) or not values.is_floating_point() or tuple(values.shape) != wanted:
            raise WrongReturn(f"{self.name}: returned {column} that are {_kind(values)}; they must be a floating-point "
                              f"tensor of shape {wanted}, one number for each of these tokens")
        values_of_critic = () if rewarded.values is None else (rewarded.values,)
        if not _are_finite(values) and _are_finite(rewarded.token_rewards, *values_of_critic):
            raise WrongReturn(f"{self.name}: returned {column} that are not finite "
                              f"({int((~values.isfinite()).sum())} of {values.numel()})")


@dataclass(frozen=True)
class UsersLoss:
    """Example: `UsersLoss("algorithm.policy_loss = mine.py:squared", squared)`, called as `squared` would be."""

    name: str
    function: Callable[..., Any]

    def __call__(self, log_probs: Tensor, columns: TokenColumns, rows: TargetRows, clip: Clip) -> tuple[Tensor, Sums]:
        """
        Raises:
            WrongReturn: what the function returned is no (scalar loss, sums to log), has no gradient, or is not finite
                on finite numbers. Its gradient is looked at in the backward pass, which raises the same.
        """
        returned = self.function(self._watched(log_probs, columns), columns, rows, clip)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise WrongReturn(f"{self.name}: returned {_kind(returned)}; it must return a pair, for example "
                              '(loss, {"policy_loss": loss.detach().double()})')
        loss, sums = returned
        if not _is_scalar(loss) or not loss.is_floating_point():
            raise WrongReturn(f"{self.name}: returned a loss that is {_kind(loss)}; it must be a scalar, for example "
                              "(columns.weight * token_loss).sum()")
        if not isinstance(sums, Mapping) or not all(isinstance(name, str) for name in sums) \
                or not all(map(_is_scalar, sums.values())):
            raise WrongReturn(f"{self.name}: returned, beside the loss, {_kind(sums)}; it must be a dict of scalar "
                              'tensors by name, for example {"policy_loss": loss.detach().double()}')
        if log_probs.numel():  # of no targets only the names of the sums are of interest
            self._require_learning(loss, log_probs, columns)
        return loss, dict(sums)

    def _require_learning(self, loss: Tensor, log_probs: Tensor, columns: TokenColumns) -> None:
        if log_probs.requires_grad and not loss.requires_grad:
            raise WrongReturn(f"{self.name}: returned a loss without a gradient, from which nothing is learned; "
                              "compute it from log_probs, without detach(), item() or no_grad()")
        if not loss.isfinite() and _are_finite(log_probs, *columns.present().values()):
            raise WrongReturn(f"{self.name}: returned the loss {loss.item()} for {log_probs.numel()} tokens, whose "
                              "log-probs, advantages and other columns are all finite; it must be finite")

    def _watched(self, log_probs: Tensor, columns: TokenColumns) -> Tensor:
        """log_probs, with an eye on the gradient that this loss alone sends to them."""
        if not log_probs.requires_grad:
            return log_probs
        mine = log_probs.view_as(log_probs)
        mine.register_hook(partial(self._require_gradient, log_probs.detach(), columns))
        return mine

    def _require_gradient(self, log_probs: Tensor, columns: TokenColumns, gradient: Tensor) -> None:
        """NaN only: a large loss scale may make infinity of a finite gradient, and is then halved."""
        if gradient.isnan().any() and _are_finite(log_probs, *columns.present().values()):
            raise WrongReturn(f"{self.name}: the gradient of its loss is NaN for {int(gradient.isnan().sum())} of "
                              f"{gradient.numel()} tokens, whose log-probs, advantages and other columns are all "
                              "finite; torch.where passes on the NaN of the side that it does not take")


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _are_finite(*columns: Tensor) -> bool:
    return all(bool(torch.isfinite(column).all()) for column in columns)


def _kind(value: object) -> str:
    """What a value is, in the words of who returned it."""
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "a dict of " + (", ".join(f"{name!r}: {_kind(item)}" for name, item in value.items()) or "nothing")
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
