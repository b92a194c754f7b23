"""Finished answers on their way while others are still being generated: to roles whose ranks have nothing else to do.

Owns the messages: every generation replica sends its answers in a fixed number of chunks, whose sizes are told with
them, so that nobody has to agree on anything. A chunk's rows are answered as soon as they are there; the answers go
home once all ranks know of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import Batch, Rows
from hybridflow.generation.records import Prompt
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.parallel.arithmetic import ceil_div
from hybridflow.parallel.mesh import Grid, Mesh
from hybridflow.parallel.world import World
from hybridflow.row_moves import Arrival, RowsOfRank
from hybridflow.trainer.roles import ScoringRole

NUM_CHUNKS = 4  # of each generation replica: the last quarter of its answers is the tail that others do not wait for


def listens(role: Grid, generation: Grid) -> bool:
    """Whether a role's ranks are free while others generate."""
    return not set(role.ranks) & set(generation.ranks)


def _hears(role: Grid, rank: int, replica: int) -> bool:
    """Whether a rank of the role is told what this replica of generation has made."""
    return role.coord(rank).dp == replica % role.layout.dp


class RowSender:
    """On the rank that speaks for a replica of generation: sends answers as they end.

    Args:
        requests: of all replicas.
        listeners: grids of the roles that listen, in the order in which these do.
    """

    def __init__(self, mesh: Mesh, requests: Sequence[Prompt], listeners: Sequence[Grid]) -> None:
        self._world, self._requests, replica = mesh.world, requests, mesh.coord.dp
        self._to = [rank for grid in listeners for rank in grid.ranks if _hears(grid, rank, replica)]
        self._each = max(1, ceil_div(len(requests), mesh.layout.dp * NUM_CHUNKS))
        self._chunk: list[tuple[int, tuple[int, ...]]] = []
        self._num_sent = 0

    def end(self, index: int, response: tuple[int, ...]) -> None:
        """The answer to request `index` has ended."""
        self._chunk.append((index, response))
        if len(self._chunk) >= self._each and self._num_sent < NUM_CHUNKS - 1:
            self._send()

    def finish(self) -> None:
        """All have ended: send what is left, and as many chunks as are listened for."""
        while self._num_sent < NUM_CHUNKS:
            self._send()

    def _send(self) -> None:
        numbers = [number for index, response in self._chunk
                   for number in (index, len(self._requests[index].ids), len(response),
                                  *self._requests[index].ids, *response)]
        body = torch.tensor(numbers, dtype=torch.int64, device=self._world.device)
        head = torch.tensor([len(self._chunk), len(numbers)], dtype=torch.int64, device=self._world.device)
        for rank in self._to:
            for message in (head, body) if numbers else (head,):
                work = dist.isend(message, rank, group=self._world.everyone)
                self._world.outbox.keep(lambda work=work, message=message: _waited(work, message))
        self._chunk, self._num_sent = [], self._num_sent + 1


def _waited(work: dist.Work, message: Tensor) -> None:
    """Hold `message` until it has been received."""
    work.wait()


@dataclass
class StreamedAnswers:
    """What a role says of the response tokens of a batch, most of it before the batch is whole. Used like
    `roles.TokenAnswers` once it is bound to the batch.
    """

    role: ScoringRole
    generation: Grid
    answers: dict[int, Tensor] = field(default_factory=dict)  # by row
    batch: Batch | None = None
    holders: RowsOfRank = ()
    arrival: Arrival | None = None

    def listen(self, chunk: int) -> None:
        """Answer the rows of one chunk of every replica of generation that this rank hears. Collective over the role's
        replica.
        """
        role, grid = self.role, self.role.blueprint.grid
        if role.engine is None:
            return
        for replica in range(self.generation.layout.dp):
            if _hears(grid, role.world.rank, replica):
                self._answer(received(role.world, speaker(self.generation, replica)))

    def bind(self, batch: Batch, replicas: Sequence[int]) -> StreamedAnswers:
        """Now that every rank knows of the batch: who generated each row says who has its answer."""
        grid, world = self.role.blueprint.grid, self.role.world
        of_dp = [tuple(row for row, replica in enumerate(replicas) if replica % grid.layout.dp == dp)
                 for dp in range(grid.layout.dp)]
        self.batch = batch
        self.holders = tuple(of_dp[grid.coord(rank).dp] if rank in grid.ranks else () for rank in range(world.size))
        return self

    def work(self) -> None:
        """Send the answers home: the work is done."""
        assert self.batch is not None, "bind comes first"
        mine = [self.answers[row] for row in self.holders[self.role.world.rank]] if self.role.engine else []
        values = torch.cat(mine) if mine else self.role.nothing()
        self.arrival = self.batch.deliver(self.role.world, self.role.answering(self.holders), values)

    def result(self) -> Tensor:
        """`[response tokens of my home rows]`, once they are home."""
        assert self.arrival is not None, "work comes first"
        return self.arrival.wait().squeeze(1)

    def _answer(self, rows: dict[int, Sample]) -> None:
        role, samples = self.role, list(rows.values())
        if not rows:
            return
        [cut] = role.scoring.cut([sample.length for sample in samples], 1, role.blueprint.token_multiple
                                 * role.blueprint.grid.layout.cp)
        order = [place for micro_batch in cut for place in micro_batch]
        packed = [role.pack(Rows(tuple(samples[place] for place in micro_batch), TokenColumns()))
                  for micro_batch in cut]
        answers, places = role.answers(packed), list(rows)
        if not role.engine.has_head:
            self.answers |= dict.fromkeys(places, role.nothing())
            return
        parts = answers.split([len(samples[place].response) for place in order])
        self.answers |= {places[place]: part for place, part in zip(order, parts, strict=True)}


def received(world: World, source: int) -> dict[int, Sample]:
    """The next chunk that a rank sends: rows by their number."""
    head = torch.empty(2, dtype=torch.int64, device=world.device)
    dist.recv(head, source, group=world.everyone)
    num_rows, size = head.tolist()
    if not size:
        return {}
    body = torch.empty(size, dtype=torch.int64, device=world.device)
    dist.recv(body, source, group=world.everyone)
    numbers, rows, start = body.tolist(), {}, 0
    for _ in range(num_rows):
        row, prompt, response = numbers[start:start + 3]
        middle, end = start + 3 + prompt, start + 3 + prompt + response
        rows[row] = Sample(tuple(numbers[start + 3:middle]), tuple(numbers[middle:end]))
        start = end
    return rows


def speaker(generation: Grid, replica: int) -> int:
    """The rank that speaks for a replica while it generates: its leader, which draws."""
    layout = generation.layout
    return next(rank for rank in generation.ranks
                if (at := generation.coord(rank)).dp == replica and (at.tp, at.pp) == (0, layout.pp - 1))
