"""What preference training minimises: the losses of pairs and rows with the coefficients of the config.

A row is a response to a prompt. Rows of pairs stand one after the other, the chosen one first. Every term is weighted
by 1 / count of the whole optimizer batch, which is known before the first backward, so that micro-batches, context
parts and replicas add up; it is counted where `TargetRows.counts_here` and 0 elsewhere. The metrics are sums in fp64 of
the same kind: their totals are the means, with no division left.

For held-out rows the same objectives are asked by `of_rows`, about numbers of whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybridflow.algorithms.dpo import DpoLoss, dpo
from hybridflow.algorithms.kto import kto
from hybridflow.algorithms.losses import Sums
from hybridflow.algorithms.reward_model import bradley_terry
from hybridflow.micro_batch import TokenColumns
from hybridflow.target_rows import TargetRows


@dataclass(frozen=True)
class Counts:
    """Counts of a whole optimizer batch. `Counts(terms=6)`: six pairs; `Counts(terms=6, desirable=2)`: six rows.

    Attributes:
        terms: pairs of a loss of pairs, rows of a loss of rows.
        desirable: rows with a good answer (kto).
    """

    terms: int
    desirable: int = 0


class RowLoss(Protocol):
    """A loss of one number a row."""

    def of_rows(self, numbers: Tensor, labels: Tensor, counts: Counts, counts_here: bool = True) -> tuple[Tensor, Sums]:
        """(loss scalar, sums) of `[rows]` numbers (log-ratios in nats, or scores) and what the data says of the rows.
        Row 2i is the chosen one of pair i and row 2i + 1 the rejected one where there are pairs.
        """
        ...


@dataclass(frozen=True)
class BradleyTerryObjective:
    """The loss of a reward model. The label of both rows of a pair is its margin, in units of the score."""

    centre_coef: float = 0.0

    def of_rows(self, numbers: Tensor, labels: Tensor, counts: Counts, counts_here: bool = True) -> tuple[Tensor, Sums]:
        """See `RowLoss`; numbers are scores."""
        chosen, rejected = in_pairs(numbers)
        losses = bradley_terry(chosen, rejected, in_pairs(labels)[0].to(chosen.dtype), self.centre_coef)
        return pair_sums(losses, chosen, rejected, counts, counts_here)


@dataclass(frozen=True)
class DpoObjective:
    """The loss of DPO and its variants (`dpo`). Labels are not looked at."""

    beta: float
    loss: DpoLoss = DpoLoss.SIGMOID
    label_smoothing: float = 0.0

    def of_rows(self, numbers: Tensor, labels: Tensor, counts: Counts, counts_here: bool = True) -> tuple[Tensor, Sums]:
        """See `RowLoss`; numbers are log-ratios."""
        chosen, rejected = in_pairs(numbers)
        losses = dpo(chosen, rejected, self.beta, self.loss, self.label_smoothing)
        return pair_sums(losses, self.beta * chosen, self.beta * rejected, counts, counts_here)


@dataclass(frozen=True)
class KtoObjective:
    """The loss of KTO (`kto`). The label of a row is 1 if the answer is desirable, else 0.

    Attributes:
        reference_point: z0 of the optimizer batch, a scalar in nats.
    """

    beta: float
    reference_point: Tensor
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def of_rows(self, numbers: Tensor, labels: Tensor, counts: Counts, counts_here: bool = True) -> tuple[Tensor, Sums]:
        """See `RowLoss`; numbers are log-ratios."""
        desirable = labels > 0.5
        losses = kto(numbers, desirable, self.reference_point.to(numbers.dtype), self.beta, self.desirable_weight,
                     self.undesirable_weight)
        loss = (losses * _each(counts.terms, counts_here)).sum()
        rewards = self.beta * numbers
        good = _mean(torch.where(desirable, rewards, 0.0), counts.desirable, counts_here)
        bad = _mean(torch.where(desirable, 0.0, rewards), counts.terms - counts.desirable, counts_here)
        return loss, {"loss": loss.detach().double(), "chosen_reward": good, "rejected_reward": bad,
                      "margin": good - bad}


def log_ratio_loss(objective: RowLoss, counts: Counts, nll_coef: float, log_probs: Tensor, columns: TokenColumns,
                   rows: TargetRows) -> tuple[Tensor, Sums]:
    """The loss of a micro-batch of a language model, plus nll_coef times the negative log-prob of its weighted tokens
    (those of chosen responses; RPO, Pang et al. 2024, arXiv:2404.19733, eq. 1).

    Args:
        log_probs: `[targets]` of the policy in training, in nats.
        columns: row_reference and row_label; weight where nll_coef is not 0.

    Returns:
        (loss scalar, sums): see `RowLoss`; nll where it is part of the loss.
    """
    assert columns.row_reference is not None and columns.row_label is not None
    ratios = rows.sums(log_probs) - rows.of_rows(columns.row_reference).to(log_probs.dtype)
    loss, sums = objective.of_rows(ratios, rows.of_rows(columns.row_label), counts, rows.counts_here)
    if nll_coef == 0:
        return loss, sums
    assert columns.weight is not None
    nll = -(columns.weight * log_probs).sum()
    loss = loss + nll_coef * nll
    return loss, sums | {"loss": sums["loss"] + nll_coef * nll.detach().double(), "nll": nll.detach().double()}


def score_loss(objective: RowLoss, counts: Counts, scores: Tensor, columns: TokenColumns,
               rows: TargetRows) -> tuple[Tensor, Sums]:
    """The loss of a micro-batch of a score head, which has one target a row.

    Args:
        scores: `[targets]`.
        columns: row_label.
    """
    assert columns.row_label is not None
    return objective.of_rows(rows.sums(scores), rows.of_rows(columns.row_label), counts, rows.counts_here)


def in_pairs(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """`[rows]` as `[pairs]` of the chosen and of the rejected rows."""
    pairs = numbers.view(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def pair_sums(losses: Tensor, chosen: Tensor, rejected: Tensor, counts: Counts,
              counts_here: bool = True) -> tuple[Tensor, Sums]:
    """(loss scalar, sums) of `[pairs]` losses and the rewards that they are about.

    Sums: loss, accuracy (pairs whose chosen response has the higher reward; equal ones count half), margin,
    chosen_reward, rejected_reward.
    """
    loss = (losses * _each(counts.terms, counts_here)).sum()
    right = (chosen > rejected).double() + 0.5 * (chosen == rejected).double()
    means = {"accuracy": right, "margin": chosen - rejected, "chosen_reward": chosen, "rejected_reward": rejected}
    return loss, {"loss": loss.detach().double()} | {name: _mean(x, counts.terms, counts_here)
                                                     for name, x in means.items()}


def ranking_accuracy(desirable: Tensor, undesirable: Tensor) -> float | None:
    """How often a good answer is above a bad one, over all such couples (equal ones count half): the area under the ROC
    curve (Mann-Whitney). None where there is none of one kind.

    Args:
        desirable, undesirable: `[rows]` and `[others]` rewards.
    """
    if not desirable.numel() or not undesirable.numel():
        return None
    above = torch.searchsorted(undesirable.sort().values, desirable).double()
    not_below = torch.searchsorted(undesirable.sort().values, desirable, right=True).double()
    return ((above + not_below) / 2).mean().item() / undesirable.numel()


def _each(count: int, counts_here: bool) -> float:
    """The factor of one term: no term is counted twice, and every rank takes part in the backward."""
    return 1.0 / max(count, 1) if counts_here else 0.0


def _mean(x: Tensor, count: int, counts_here: bool) -> Tensor:
    return x.detach().double().sum() * _each(count, counts_here)
