"""What the ranks of a replica tell each other in a step of generation.

Owns the messages. Who computes what follows from the mesh: the last stage has the logits, and its tensor rank 0, the
leader, samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.generation.sampling import Choice
from hybridflow.parallel.mesh import Mesh


@dataclass(frozen=True)
class Chosen:
    """Choices on the host: int64 tokens and float64 log-probs `[samples]`, and whether the leader was asked to stop.

    `processed` is None where every token was drawn from the raw distribution.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    processed: np.ndarray | None
    stop: bool


class Choices:
    """What was sampled in a step. On its way to the host from the start on.

    Attributes:
        tokens: int64 `[samples]`, on the device.
    """

    def __init__(self, table: Tensor, tokens: Tensor) -> None:
        """`table` `[3 or 2, samples + 1]` float64: tokens, raw and processed log-probs; a last column says stop."""
        self.tokens = tokens
        self._arrived: torch.cuda.Event | None = None
        self._table = table
        if table.is_cuda:
            self._table = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            self._table.copy_(table, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def on_host(self) -> Chosen:
        """Waits until the host has them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, log_probs, *processed = self._table[:, :-1].numpy()
        return Chosen(tokens.astype(np.int64), log_probs, processed[0] if processed else None,
                      bool(self._table[0, -1]))


class Exchange:
    """The messages of one rank.

    Attributes:
        num_groups: of sequences that are in flight at once, one for each stage.
        lag: steps that the host may be behind the device, so that it never waits for the step under way.
    """

    def __init__(self, mesh: Mesh, draws_raw: bool) -> None:
        """`draws_raw`: processed log-probs never differ from raw ones, and are not sent."""
        self._tp, self.device = mesh.tp, mesh.device
        self._columns = 2 if draws_raw else 3
        self.num_groups = mesh.pp.size
        self.lag = 0 if mesh.device.type == "cpu" else 1
        self.is_last = mesh.pp.index == mesh.pp.size - 1
        self.leads_sampling = self.is_last and mesh.tp.index == 0

    def share(self, choice: Choice | None, samples: int, stop: bool) -> Choices:
        """The leader's choice on every rank of the replica; `choice` and `stop` of others do not count.

        The logits are the same on every tensor rank, but what follows need not be bit for bit: running sums on CUDA are
        not deterministic, and one differing token would part the ranks' caches for good. It costs one small message a
        step beside the two all-reduces of every layer, and saves the other ranks the sampling.
        """
        # fp64 holds every token id and every log-prob exactly
        table = torch.empty(self._columns, samples + 1, dtype=torch.float64, device=self.device)
        if choice is not None:
            table[0, :-1], table[1, :-1], table[0, -1] = choice.tokens, choice.log_probs, stop
            if self._columns == 3:
                table[2, :-1] = choice.log_probs if choice.processed is None else choice.processed
        if self._tp.size > 1:
            dist.broadcast(table, self._tp.ranks[0], group=self._tp.process_group)
        return Choices(table, table[0, :-1].long() if choice is None else choice.tokens)
