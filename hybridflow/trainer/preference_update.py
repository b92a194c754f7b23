"""One optimizer step on rows that every rank has: pairs, which stay together, or single answers.

Owns making samples of examples, and what goes with them into a micro-batch. What is minimised is handed in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.algorithms.kto import mismatched
from hybridflow.algorithms.preference import Counts, RowLoss, log_ratio_loss, score_loss
from hybridflow.batch import Rows
from hybridflow.data.preference import LabelledExample, PairExample
from hybridflow.engine.native import Loss, Output, Update
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.target_rows import TargetRows
from hybridflow.trainer.roles import TrainedRole, response_counts, values


def pair_samples(examples: Sequence[PairExample]) -> list[Sample]:
    """The chosen and the rejected row of each pair, one after the other."""
    return [Sample(example.prompt_ids, response) for example in examples
            for response in (example.chosen_ids, example.rejected_ids)]


def pair_margins(examples: Sequence[PairExample]) -> list[float]:
    """The margin of its pair, for each row."""
    return [example.margin for example in examples for _ in range(2)]


def label_samples(examples: Sequence[LabelledExample]) -> list[Sample]:
    """A row of each answer."""
    return [Sample(example.prompt_ids, example.response_ids) for example in examples]


def mismatched_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Each prompt with the answer to another one (`algorithms.kto.mismatched`)."""
    others = mismatched([sample.prompt for sample in samples])
    return [Sample(sample.prompt, samples[other].response) for sample, other in zip(samples, others, strict=True)]


def num_tokens(samples: Sequence[Sample]) -> int:
    """Prompt and response tokens of all rows."""
    return sum(sample.length for sample in samples)


def learn_log_ratios(actor: TrainedRole, samples: Sequence[Sample], reference: Tensor, labels: Tensor, loss: Loss,
                     *, together: int = 1, trained: Sequence[bool] | None = None) -> Update:
    """One optimizer step on rows that every rank has. Collective.

    Args:
        reference, labels: `[rows]` fp64, for the columns row_reference and row_label.
        together: rows of a unit.
        trained: the rows whose tokens have a weight of their own; None for all.
    """
    kept = [True] * len(samples) if trained is None else trained
    share = actor.share(range(len(samples)), [sample.length for sample in samples], actor.training, together)
    rows = list(share.rows_of[actor.world.rank])
    mine = tuple(samples[row] for row in rows)
    targets = TargetRows.of([len(sample.response) for sample in mine], reference.device)
    of_mine = torch.tensor(rows, dtype=torch.int64, device=reference.device)
    mask = actor.nothing().new_tensor([kept[row] for row in rows])
    columns = TokenColumns(row_reference=targets.to_targets(reference[of_mine]), loss_mask=targets.to_targets(mask),
                           row_label=targets.to_targets(labels[of_mine]))
    counts = response_counts([len(sample.response) for sample, counted in zip(samples, kept, strict=True) if counted])
    return actor.learn(Rows(mine, columns), share.sizes, counts, loss)


def learn_scores(role: TrainedRole, samples: Sequence[Sample], labels: Sequence[float], loss: Loss) -> Update:
    """One optimizer step of a score head on pairs of rows that every rank has. Collective.

    Args:
        labels: of each row, for the column row_label.
    """
    share = role.share(range(len(samples)), [sample.length for sample in samples], role.training, together=2)
    rows, micro_batches = iter(share.rows_of[role.world.rank]), []
    for size in share.sizes:
        run = [next(rows) for _ in range(size)]
        label = torch.tensor([labels[row] for row in run], dtype=torch.float64, device=role.world.device)
        micro_batches.append(role.pack_last_tokens(
            Rows(tuple(samples[row] for row in run), TokenColumns(row_label=label))))
    with role.turn():
        return role.trainer.train(micro_batches, loss, trace=role.lane)


def log_ratio_loss_of(objective: RowLoss, counts: Counts, nll_coef: float, output: Output, columns: TokenColumns,
                      rows: TargetRows) -> tuple[Tensor, dict[str, Tensor]]:
    """`algorithms.preference.log_ratio_loss` of what the engine gives."""
    return log_ratio_loss(objective, counts, nll_coef, values(output), columns, rows)


def score_loss_of(objective: RowLoss, counts: Counts, output: Output, columns: TokenColumns,
                  rows: TargetRows) -> tuple[Tensor, dict[str, Tensor]]:
    """`algorithms.preference.score_loss` of what the engine gives."""
    return score_loss(objective, counts, values(output), columns, rows)
