"""The messages of one pipeline stage in flight on its links, during one run of a schedule.

Owns transfers and the buffers that they need, and lets them go. It never decides when one starts (that is the schedule)
and knows nothing of what a message holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.mesh import Mesh
from hybridflow.parallel.schedules.actions import Action
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.schedules.messages import Link, link_of

UNANSWERED_SENDS = 2  # on one link, where no answers come


@dataclass
class _Transfer:
    """A message on its way; the tensor must outlive it."""

    work: dist.Work | None
    tensor: Tensor

    def wait(self) -> Tensor:
        assert self.work is not None, "this rank is not in the group of its own link"
        self.work.wait()
        return self.tensor


class Messages:
    """Starts and finishes the messages of a schedule on this rank's stage.

    What was sent is let go early, so that the memory of a run does not grow with its micro-batches. In training, a
    message from the neighbour shows which sends to it are over (`released_sends`): nobody waits for that. Forwards
    alone get no answers; there a send waits until at most one other on its link is not received. This cannot lock: both
    ends of a link have its messages in one order, a receive is posted at most one computation before its use, and of
    the stages' forward orders (`forward_only`) the message before the previous one is due before this one is made.

    Args:
        released: of this schedule and stage, as `released_sends` gives it; None for forwards alone.
        shape_of: of the message of a micro-batch, by its number; the same at both ends, so nothing is negotiated.
    """

    def __init__(self, chunks: Chunks, released: Mapping[Action, Sequence[Action]] | None, mesh: Mesh,
                 shape_of: Callable[[int], tuple[int, ...]], dtype: torch.dtype) -> None:
        self._chunks, self._mesh, self._shape_of, self._dtype = chunks, mesh, shape_of, dtype
        self._answered = released is not None
        self._released = {} if released is None else released
        self._received: dict[Action, _Transfer] = {}
        self._sent: dict[Link, dict[Action, _Transfer]] = {}

    def post(self, receive: Action) -> None:
        """Start receiving; `wait` gives the tensor."""
        assert receive.index is not None
        buffer = torch.empty(self._shape_of(receive.index), dtype=self._dtype, device=self._mesh.device)
        group = self._mesh.links[link_of(self._chunks, receive)]
        work = dist.irecv(buffer, group.ranks[0], group=group.process_group)
        self._received[receive] = _Transfer(work, buffer)

    def wait(self, receive: Action) -> Tensor:
        """The tensor of a receive that was posted, once it is there."""
        tensor = self._received.pop(receive).wait()
        for send in self._released.get(receive, ()):
            self._sent[link_of(self._chunks, send)].pop(send).wait()  # over already: this only lets go of the buffer
        return tensor

    def send(self, send: Action, tensor: Tensor) -> None:
        """Start sending; nobody may write to `tensor` any more."""
        link = link_of(self._chunks, send)
        on_link = self._sent.setdefault(link, {})
        while not self._answered and len(on_link) >= UNANSWERED_SENDS:
            on_link.pop(next(iter(on_link))).wait()
        group, tensor = self._mesh.links[link], tensor.contiguous()
        on_link[send] = _Transfer(dist.isend(tensor, group.ranks[1], group=group.process_group), tensor)

    def finish(self) -> None:
        """Wait for the sends that no answer has confirmed."""
        assert not self._received, list(self._received)
        for on_link in self._sent.values():
            while on_link:
                on_link.pop(next(iter(on_link))).wait()
