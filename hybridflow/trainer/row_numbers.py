"""One number a row of given answers: their log-probs under a model, or their scores, on every rank.

Owns dealing rows out that every rank has, for roles to answer, and making a table of the answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.crew import Crew
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.packing import split_rows
from hybridflow.parallel.world import World
from hybridflow.target_rows import TargetRows
from hybridflow.trainer.roles import ScoringRole


def dealt_out(samples: Sequence[Sample], world: World) -> Batch:
    """`samples`, the same on every rank, as a batch in which each has one home."""
    home = tuple(split_rows(range(len(samples)), world.size))
    return Batch(tuple(len(sample.prompt) for sample in samples), tuple(len(sample.response) for sample in samples),
                 tuple(range(len(samples))), home, tuple(samples[row] for row in home[world.rank]), TokenColumns())


def response_log_probs(role: ScoringRole, samples: Sequence[Sample]) -> Tensor:
    """`[rows]` fp64 on every rank: the log-prob of each whole response, in nats. Collective."""
    batch = dealt_out(samples, role.world)
    tokens = role.answer_tokens(batch).double()
    table = torch.zeros(len(samples), dtype=torch.float64, device=tokens.device)
    rows = TargetRows.of(batch.home_lengths(role.world.rank), tokens.device)
    table[list(batch.home[role.world.rank])] = rows.sums(tokens)
    return Crew.whole(role.world).sum(table)


def row_scores(role: ScoringRole, samples: Sequence[Sample]) -> Tensor:
    """`[rows]` fp64 on every rank: what a score head says of each row. Collective."""
    return role.score_rows(dealt_out(samples, role.world))
