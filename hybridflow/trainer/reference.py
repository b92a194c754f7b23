"""The log-probs of given answers under the frozen start of the model: asked as steps come, or once for all data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.micro_batch import Sample
from hybridflow.trainer.roles import ScoringRole
from hybridflow.trainer.row_numbers import response_log_probs

ROWS_AT_ONCE = 1024  # of a table: what is moved between ranks in one go


class Reference:
    """A frozen role that is asked, until it is precomputed: then its weights are given up and a table is read."""

    def __init__(self, role: ScoringRole) -> None:
        self.role: ScoringRole | None = role
        self.table: dict[int, Tensor] = {}

    def of(self, examples: Sequence[int], samples: Sequence[Sample]) -> Tensor:
        """`[rows]` fp64 on every rank: log-probs of whole responses in nats. Collective while nothing is precomputed.

        Args:
            examples: places in the data, each with equally many of the `samples`.
        """
        if self.role is not None:
            return self.of_all(samples)
        return torch.cat([self.table[example] for example in examples])

    def of_all(self, samples: Sequence[Sample]) -> Tensor:
        """The same of rows that are nowhere in the data. Collective."""
        assert self.role is not None, "it has been given up"
        if not samples:
            return torch.zeros(0, dtype=torch.float64, device=self.role.world.device)
        parts = [samples[start:start + ROWS_AT_ONCE] for start in range(0, len(samples), ROWS_AT_ONCE)]
        return torch.cat([response_log_probs(self.role, part) for part in parts])

    def precompute(self, examples: Sequence[int], samples: Sequence[Sample]) -> None:
        """Ask about all examples, and give the role up. Collective."""
        numbers = self.of_all(samples)
        self.table = dict(zip(examples, numbers.view(len(examples), -1), strict=True))
        self.role = None
