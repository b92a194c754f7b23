"""The messages between the ranks of a generating pipeline.

Owns what is on its way. As many groups of sequences as there are stages take turns, so that every stage has work: here
groups a and b on two stages, and the ticks at which they work.

    tick      0    1    2    3    4    5
    stage 0   a0   b0   a1   b1   a2   b2
    stage 1        a0   b0   a1   b1   a2   b2

Turns are the same, and in the same order, on every stage (`session`): a plan follows from what was committed before it,
and a turn of a group begins with the tokens of the turn before. So nobody has to say what is coming: the number of
tokens of a turn gives the size of both its messages, hidden states from stage to stage, and what was sampled from the
leader (tensor rank 0 of the last stage) to all.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.mesh import Mesh


class StageLinks:
    """This rank's ways to the other ranks of its replica."""

    def __init__(self, mesh: Mesh, hidden_size: int, dtype: torch.dtype) -> None:
        """`hidden_size`, `dtype`: of the hidden states."""
        stage, pp = mesh.pp.index, mesh.pp.size
        self._before = mesh.links[stage - 1, stage] if stage > 0 else None
        self._after = mesh.links[stage, stage + 1] if stage < pp - 1 else None
        self._replica, self._device = mesh.model, mesh.device
        self._leader = mesh.model.ranks[(pp - 1) * mesh.tp.size]
        self._hidden_size, self._dtype = hidden_size, dtype
        # Of each rank, sends that may not be over. A turn's messages are received before the next turn of its group
        # begins there, so that in this many turns the oldest one is over.
        self._most_sends = 2 * pp
        self._sends: deque[tuple[list[dist.Work], Tensor]] = deque()

    def receive_hidden(self, tokens: int) -> Tensor | None:
        """`[tokens, hidden]` of the stage before; None on the first."""
        if self._before is None:
            return None
        hidden = torch.empty(tokens, self._hidden_size, dtype=self._dtype, device=self._device)
        dist.recv(hidden, self._before.ranks[0], group=self._before.process_group)
        return hidden

    def send_hidden(self, hidden: Tensor) -> None:
        """Start to send `[tokens, hidden]` to the next stage; the caller may overwrite it at once."""
        assert self._after is not None
        hidden = hidden.clone(memory_format=torch.contiguous_format)
        self._keep([dist.isend(hidden, self._after.ranks[1], group=self._after.process_group)], hidden)

    def tell(self, mail: Tensor) -> None:
        """Start to send the leader's `mail` to all others of the replica. Nobody may write to it any more."""
        others = [rank for rank in self._replica.ranks if rank != self._leader]
        self._keep([dist.isend(mail, rank, group=self._replica.process_group) for rank in others], mail)

    def hear(self, mail: Tensor) -> dist.Work:
        """Start to receive the leader's next mail; mails arrive in the order of these calls."""
        return dist.irecv(mail, self._leader, group=self._replica.process_group)

    def finish(self) -> None:
        """Wait until everything is received that this rank has sent."""
        while self._sends:
            self._wait_for_oldest()

    def _keep(self, works: list[dist.Work], tensor: Tensor) -> None:
        self._sends.append((works, tensor))
        if len(self._sends) > self._most_sends:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for work in self._sends.popleft()[0]:
            work.wait()
