"""Messages under way: what a rank hands to the backend, where it comes from and where it goes.

Owns buffers, staging and waits of messages. What goes in which message is `wires`', and when it is `transfer`'s or
`flight`'s.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.peers import PeerError
from hybridflow.parallel.wires import Kept, Message, Round

NAMED_TENSORS = 3  # in an error

Storages = dict[str, Tensor]


class TransferError(PeerError):
    """A message did not arrive or could not be sent. Names the rank at the other end and the first tensors."""


class Parcel:
    """A message and where its elements lie on this rank.

    Attributes:
        buffer: `[numel]`, contiguous in the wire's dtype: what is handed to the backend.
        places: by part of the message, the views that it comes from (one) or goes to besides the buffer.
    """

    def __init__(self, message: Message, sent: bool, storages: Storages) -> None:
        self.message, self.sent = message, sent
        self.places = [[spot.view(storages) for spot in ((part.source,) if sent else part.places)]
                       for part in message.parts]
        self.buffer: Tensor | None = None

    @property
    def contents(self) -> Hashable:
        """The same for parcels that are packed alike: what several receivers want from here is packed once."""
        return tuple(part.source for part in self.message.parts) if self.sent else self

    def lay_in_place(self, dtype: torch.dtype, device: torch.device) -> None:
        """Use a place itself as the buffer, if one will do."""
        if len(self.places) == 1:
            [views] = self.places
            fit = [view for view in views if view.dtype == dtype and view.device == device and view.is_contiguous()]
            if fit:
                self.buffer = fit[0].view(-1)
                self.places = [[view for view in views if view is not fit[0]]]

    def pack(self) -> None:
        """Copy what is sent into the buffer."""
        if self.sent:
            for part, [view] in self._staged():
                part.copy_(view)

    def unpack(self) -> None:
        """Copy what has come from the buffer to all its other places."""
        if not self.sent:
            for part, views in self._staged():
                for view in views:
                    view.copy_(part)

    def _staged(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Each part's stretch of the buffer, shaped as it is, with the places that it has besides."""
        assert self.buffer is not None
        start = 0
        for views in self.places:
            if views:
                end = start + views[0].numel()
                yield self.buffer[start:end].view(views[0].shape), views
                start = end

    def operation(self) -> dist.P2POp:
        """As bytes, which every backend can carry."""
        assert self.buffer is not None
        return dist.P2POp(dist.isend if self.sent else dist.irecv, self.buffer.view(torch.uint8), self.message.peer)

    def __str__(self) -> str:
        names = list(dict.fromkeys(piece.box.name for piece in self.message.pieces))
        more = f" and {len(names) - NAMED_TENSORS} more" if len(names) > NAMED_TENSORS else ""
        return f"{', '.join(names[:NAMED_TENSORS])}{more} {'to' if self.sent else 'from'} rank {self.message.peer}"


@dataclass(frozen=True)
class InFlight:
    """A round between its start and its end, which keeps what travels alive."""

    hop: int = 0
    parcels: list[Parcel] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)

    @classmethod
    def start(cls, hop: int, parcels: list[Parcel]) -> InFlight:
        """Hand all parcels to the backend as one group: receives first, a wire's messages in the same order on both
        ends.
        """
        ordered = sorted(parcels, key=lambda parcel: parcel.sent)
        try:
            works = dist.batch_isend_irecv([parcel.operation() for parcel in ordered]) if ordered else []
        except RuntimeError as error:
            raise failed(ordered, error) from error
        return cls(hop, ordered, works)

    def land(self) -> InFlight:
        """Wait for everything and put it in its place; nothing is in flight then."""
        each_its_own = len(self.works) == len(self.parcels)  # else the backend waits for the group as a whole
        for number, work in enumerate(self.works):
            try:
                work.wait()
            except RuntimeError as error:
                raise failed([self.parcels[number]] if each_its_own else self.parcels, error) from error
        for parcel in self.parcels:
            parcel.unpack()
        return InFlight()


class Staging:
    """A buffer for what does not travel from and to its place. It is kept from round to round."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self.free()

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def pack(self, parcels: Sequence[Parcel]) -> None:
        """Give each parcel a part as its buffer, with what it sends in it. What had one before must be over."""
        distinct = {parcel.contents: parcel for parcel in parcels}
        numel = sum(parcel.message.numel for parcel in distinct.values())
        if numel > self._buffer.numel():
            self.free()  # before there is a larger one
            self._buffer = torch.empty(numel, dtype=self._dtype, device=self._device)
        parts = self._buffer[:numel].split([parcel.message.numel for parcel in distinct.values()])
        for parcel, part in zip(distinct.values(), parts, strict=True):
            parcel.buffer = part
            parcel.pack()
        for parcel in parcels:
            parcel.buffer = distinct[parcel.contents].buffer

    def free(self) -> None:
        self._buffer = torch.empty(0, dtype=self._dtype, device=self._device)


def keep(kept: Kept, src: Storages, dst: Storages) -> None:
    """Copy what the rank has already, but not onto itself."""
    here, there = src[kept.source.storage], dst[kept.place.storage]
    if not (kept.alike and here.data_ptr() == there.data_ptr() and here.dtype == there.dtype):
        kept.place.view(dst, kept.box).copy_(kept.source.view(src, kept.box))


def parcels_of(now: Round, src: Storages, dst: Storages, wire_dtype: torch.dtype, device: torch.device) -> list[Parcel]:
    """Those of a round, from and to these storages; without a buffer yet where they have to be staged."""
    have = dst if now.passes_on else src
    parcels = [*(Parcel(message, True, have) for message in now.sends),
               *(Parcel(message, False, dst) for message in now.receives)]
    for parcel in parcels:
        parcel.lay_in_place(wire_dtype, device)
    return parcels


def failed(parcels: list[Parcel], error: RuntimeError) -> TransferError:
    """What to raise where the backend did not bring these."""
    return TransferError(f"could not move {'; '.join(map(str, parcels))}: {error}")
