"""Carries out a TransferPlan: local copies, and point-to-point rounds of bounded size. Only this moves weights.

Owns what is in flight: messages, the two staging buffers and the waits. What goes in which round is `wires`'.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.peers import PeerError
from hybridflow.parallel.plan import Copy, TransferPlan
from hybridflow.parallel.wire_rooms import agreed_rooms
from hybridflow.parallel.wires import Kept, Message, Round, first_reads, room_of_wires, rounds_of, wires_of
from hybridflow.parallel.world import World

DEFAULT_BUCKET_BYTES = 256 * 2**20  # measured on gloo: with 64 MiB, 12 rounds of 200 MB a rank take a tenth longer
ALONE_BYTES = 128 * 2**10  # measured on gloo: from here on a message of its own is faster than a copy at both ends
NAMED_TENSORS = 3  # in an error

Storages = dict[str, Tensor]


class TransferError(PeerError):
    """A message did not arrive or could not be sent. Names the rank at the other end and the first tensors."""


@dataclass
class TransferStats:
    """Counted on this rank, over all rounds so far.

    Attributes:
        received_bytes: of the messages handed to receive calls.
        sent_bytes: of those handed to send calls.
        peak_buffer_bytes: of the staging buffers, the most at one time.
    """

    received_bytes: int = 0
    sent_bytes: int = 0
    peak_buffer_bytes: int = 0


class Transfer:
    """This rank's part of a plan, cut into rounds of bounded size that can be carried out one at a time.

    Two rounds are in flight: while one travels, the one before is unpacked. What lies contiguously in the wire's dtype
    is sent from and received into its place, if it is a message of its own; the rest goes by way of a staging buffer.

    Attributes:
        stats: counted from the start.
    """

    def __init__(self, plan: TransferPlan, world: World, *, wire_dtype: torch.dtype,
                 bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        """Collective over the ranks of the plan: the two ends of a wire agree on how much it carries in a round.

        Args:
            wire_dtype: values are cast to it by the sender and from it by the receiver.
            bucket_bytes: bounds what is in flight on one rank (tensors are cut to fit).
        Raises:
            ValueError: no room, or a rank outside the world.
            PeerError: the ends of a wire have different plans, or one does not answer.
        """
        if bucket_bytes < 2 * wire_dtype.itemsize:
            raise ValueError(f"bucket_bytes = {bucket_bytes}: two rounds of one element of {wire_dtype} need "
                             f"{2 * wire_dtype.itemsize}")
        outside = [rank for rank in plan.ranks if not 0 <= rank < world.size]
        if outside:
            raise ValueError(f"the plan has ranks {outside[:5]}, of a world of {world.size}")
        self.world, self.wire_dtype, self.stats = world, wire_dtype, TransferStats()
        copies = plan.of_rank(world.rank)
        wires = wires_of(copies)
        room = agreed_rooms(room_of_wires(wires, bucket_bytes // (2 * wire_dtype.itemsize)), wires, world)
        self._rounds = rounds_of(world.rank, copies, room, max(1, ALONE_BYTES // wire_dtype.itemsize))
        self._first_reads = first_reads(self._rounds)
        self._needs = _needs(world.rank, copies)
        self._in_flight = _InFlight()
        self._staging = (_Staging(wire_dtype, world.device), _Staging(wire_dtype, world.device))

    @property
    def num_rounds(self) -> int:
        """Of this rank, at least one. All ranks do their rounds in order; nothing else needs to be agreed."""
        return len(self._rounds)

    def sources(self, number: int) -> frozenset[str]:
        """Storages of the source map that round `number` is the first to read: they must be ready by then."""
        return self._first_reads[number]

    @torch.no_grad()
    def round(self, number: int, src: Storages, dst: Storages) -> None:
        """Start round `number` and finish the one before, from and to this rank's storages by name.

        Rounds are called in order; storages stay valid from the first to the last, which ends with all in its place.

        Raises:
            ValueError: a storage that is missing, has gaps or is too short for its shards.
            TransferError: a rank at the other end of a wire is gone, or does not answer in time.
        """
        now = self._rounds[number]
        if number == 0:
            self._in_flight = _InFlight()  # whatever a transfer that failed has left
            for storages, needs in zip((src, dst), self._needs):
                _require(storages, needs)
        if now.passes_on and self._in_flight.hop < now.hop:
            self._in_flight = self._in_flight.land()
        earlier, self._in_flight = self._in_flight, self._post(now, self._staging[number % 2], src, dst)
        for kept in now.kept:
            _keep(kept, src, dst)
        earlier.land()
        if number == self.num_rounds - 1:
            self._in_flight = self._in_flight.land()
            for staging in self._staging:
                staging.free()

    def _post(self, now: Round, staging: _Staging, src: Storages, dst: Storages) -> _InFlight:
        """Start to send and to receive."""
        have = dst if now.passes_on else src
        parcels = [*(_Parcel(message, True, have) for message in now.sends),
                   *(_Parcel(message, False, dst) for message in now.receives)]
        for parcel in parcels:
            parcel.lay_in_place(self.wire_dtype, self.world.device)
        staging.pack([parcel for parcel in parcels if parcel.buffer is None])
        self._count(parcels)
        return _InFlight.start(now.hop, parcels)

    def _count(self, parcels: list[_Parcel]) -> None:
        stats, size = self.stats, self.wire_dtype.itemsize
        stats.sent_bytes += sum(size * parcel.message.numel for parcel in parcels if parcel.sent)
        stats.received_bytes += sum(size * parcel.message.numel for parcel in parcels if not parcel.sent)
        stats.peak_buffer_bytes = max(stats.peak_buffer_bytes, sum(staging.nbytes for staging in self._staging))


def execute(plan: TransferPlan, world: World, src: Storages, dst: Storages, *, wire_dtype: torch.dtype,
            bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> TransferStats:
    """Fill this rank's destination storages, all rounds of a `Transfer`. Collective over the ranks of the plan."""
    transfer = Transfer(plan, world, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes)
    for number in range(transfer.num_rounds):
        transfer.round(number, src, dst)
    return transfer.stats


class _Parcel:
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
class _InFlight:
    """A round between its start and its end, which keeps what travels alive."""

    hop: int = 0
    parcels: list[_Parcel] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)

    @classmethod
    def start(cls, hop: int, parcels: list[_Parcel]) -> _InFlight:
        """Hand all parcels to the backend as one group: receives first, a wire's messages in the same order on both
        ends.
        """
        ordered = sorted(parcels, key=lambda parcel: parcel.sent)
        try:
            works = dist.batch_isend_irecv([parcel.operation() for parcel in ordered]) if ordered else []
        except RuntimeError as error:
            raise _failed(ordered, error) from error
        return cls(hop, ordered, works)

    def land(self) -> _InFlight:
        """Wait for everything and put it in its place; nothing is in flight then."""
        each_its_own = len(self.works) == len(self.parcels)  # else the backend waits for the group as a whole
        for number, work in enumerate(self.works):
            try:
                work.wait()
            except RuntimeError as error:
                raise _failed([self.parcels[number]] if each_its_own else self.parcels, error) from error
        for parcel in self.parcels:
            parcel.unpack()
        return _InFlight()


class _Staging:
    """A buffer for what does not travel from and to its place. It is kept from round to round."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self.free()

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def pack(self, parcels: Sequence[_Parcel]) -> None:
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


def _keep(kept: Kept, src: Storages, dst: Storages) -> None:
    """Copy what the rank has already, but not onto itself."""
    here, there = src[kept.source.storage], dst[kept.place.storage]
    if not (kept.alike and here.data_ptr() == there.data_ptr() and here.dtype == there.dtype):
        kept.place.view(dst, kept.box).copy_(kept.source.view(src, kept.box))


def _needs(rank: int, copies: Sequence[Copy]) -> tuple[dict[str, int], dict[str, int]]:
    """How many elements a rank's storages must have, of the source and of the destination."""
    needs: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for copy in copies:
        ends = [(copy.hop > 0, copy.src_shard)] if copy.source == rank else []
        ends += [(True, shard) for shard in copy.dst_shards] if copy.dest == rank else []
        for is_destination, shard in ends:
            of = needs[is_destination]
            of[shard.storage] = max(of.get(shard.storage, 0), shard.end_of(copy.box))
    return needs


def _require(storages: Storages, needs: dict[str, int]) -> None:
    missing = [f"{name} is missing" for name in needs if name not in storages]
    wrong = [f"{name} of shape {tuple(storages[name].shape)}, strides {storages[name].stride()}, needs {numel} elements"
             " without gaps" for name, numel in needs.items()
             if name in storages and not (storages[name].is_contiguous() and storages[name].numel() >= numel)]
    if missing or wrong:
        raise ValueError(f"storages do not fit the plan: {'; '.join(missing + wrong)}")


def _failed(parcels: list[_Parcel], error: RuntimeError) -> TransferError:
    return TransferError(f"could not move {'; '.join(map(str, parcels))}: {error}")
