"""Carries out a TransferPlan: local copies, and point-to-point rounds of bounded size. Only this moves weights.

Owns the order of rounds and their two staging buffers. What goes in which round is `wires`', a message `parcels`'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridflow.parallel.parcels import InFlight, Parcel, Staging, Storages, keep, parcels_of
from hybridflow.parallel.plan import Copy, TransferPlan
from hybridflow.parallel.wire_rooms import agreed_rooms
from hybridflow.parallel.wires import Round, first_reads, room_of_wires, rounds_of, wires_of
from hybridflow.parallel.world import World

DEFAULT_BUCKET_BYTES = 256 * 2**20  # measured on gloo: with 64 MiB, 12 rounds of 200 MB a rank take a tenth longer
ALONE_BYTES = 128 * 2**10  # measured on gloo: from here on a message of its own is faster than a copy at both ends


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
        self._in_flight = InFlight()
        self._staging = (Staging(wire_dtype, world.device), Staging(wire_dtype, world.device))

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
            self._in_flight = InFlight()  # whatever a transfer that failed has left
            for storages, needs in zip((src, dst), self._needs):
                _require(storages, needs)
        if now.passes_on and self._in_flight.hop < now.hop:
            self._in_flight = self._in_flight.land()
        earlier, self._in_flight = self._in_flight, self._post(now, self._staging[number % 2], src, dst)
        for kept in now.kept:
            keep(kept, src, dst)
        earlier.land()
        if number == self.num_rounds - 1:
            self._in_flight = self._in_flight.land()
            for staging in self._staging:
                staging.free()

    def _post(self, now: Round, staging: Staging, src: Storages, dst: Storages) -> InFlight:
        """Start to send and to receive."""
        parcels = parcels_of(now, src, dst, self.wire_dtype, self.world.device)
        staging.pack([parcel for parcel in parcels if parcel.buffer is None])
        self._count(parcels)
        return InFlight.start(now.hop, parcels)

    def _count(self, parcels: list[Parcel]) -> None:
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
