"""Carries out a TransferPlan: local copies, and point-to-point rounds of bounded buckets. Only this moves weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.box import Box
from hybridflow.parallel.plan import Copy, TransferPlan
from hybridflow.parallel.world import World

DEFAULT_BUCKET_BYTES = 64 * 2**20


@dataclass
class TransferStats:
    """Bytes of the buffers handed to receive calls on this rank."""

    received_bytes: int = 0


@dataclass(frozen=True)
class Piece:
    """A part of a copy small enough for a bucket."""

    copy: Copy
    box: Box


Bucket = list[Piece]


class Transfer:
    """This rank's part of a plan, cut into rounds of bounded buckets that can be carried out one at a time.

    Attributes:
        num_rounds: of this rank, at least one. Two ranks meet in a round if both have data for each other in it, so all
            ranks do their rounds in order, and nothing else needs to be agreed.
        stats: counted from the start.
    """

    def __init__(self, plan: TransferPlan, world: World, *, wire_dtype: torch.dtype,
                 bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        """`wire_dtype`: values are cast to it by the sender and from it by the receiver. `bucket_bytes` bounds the
        bytes of all buffers in flight on one rank (tensors are cut to fit).
        """
        self.world, self.wire_dtype, self.stats = world, wire_dtype, TransferStats()
        mine = plan.of_rank(world.rank)
        per_wire = max(1, bucket_bytes // wire_dtype.itemsize // max(1, plan.max_peers))
        self._kept = [c for c in mine if c.source == world.rank == c.dest]
        self._sends = _buckets([c for c in mine if c.source == world.rank != c.dest], per_wire, lambda c: c.dest)
        self._receives = _buckets([c for c in mine if c.dest == world.rank != c.source], per_wire, lambda c: c.source)
        self.num_rounds = max([1, *(len(b) for b in (*self._sends.values(), *self._receives.values()))])

    @torch.no_grad()
    def round(self, number: int, src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
        """Carry out one round, from and to this rank's storages by name. What a rank has already goes with the first.
        """
        receives = {peer: buckets[number] for peer, buckets in self._receives.items() if number < len(buckets)}
        sends = {peer: buckets[number] for peer, buckets in self._sends.items() if number < len(buckets)}
        incoming = {peer: torch.empty(_numel(bucket), dtype=self.wire_dtype, device=self.world.device)
                    for peer, bucket in receives.items()}
        outgoing = {peer: _pack(bucket, src, self.wire_dtype, self.world.device) for peer, bucket in sends.items()}
        ops = [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in incoming.items()]
        ops += [dist.P2POp(dist.isend, buffer, peer) for peer, buffer in outgoing.items()]
        works = dist.batch_isend_irecv(ops) if ops else []
        if number == 0:
            self._keep(src, dst)
        for work in works:
            work.wait()
        for peer, buffer in incoming.items():
            _unpack(receives[peer], buffer, dst)
        self.stats.received_bytes += sum(b.numel() * b.element_size() for b in incoming.values())

    def _keep(self, src: dict[str, Tensor], dst: dict[str, Tensor]) -> None:
        for copy in self._kept:
            source = copy.src_shard.view(src, copy.box)
            for shard in copy.dst_shards:
                shard.view(dst, copy.box).copy_(source)


def execute(plan: TransferPlan, world: World, src: dict[str, Tensor], dst: dict[str, Tensor], *,
            wire_dtype: torch.dtype, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> TransferStats:
    """Fill this rank's destination storages, all rounds of a `Transfer`. Collective over the ranks of the plan."""
    transfer = Transfer(plan, world, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes)
    for number in range(transfer.num_rounds):
        transfer.round(number, src, dst)
    return transfer.stats


def _buckets(copies: list[Copy], max_numel: int, peer_of: Callable[[Copy], int]) -> dict[int, list[Bucket]]:
    """For each peer its copies in plan order, cut and filled into buckets of at most `max_numel` elements.

    Sender and receiver cut alike, since both see the same copies in the same order.
    """
    buckets: dict[int, list[Bucket]] = {}
    room: dict[int, int] = {}
    for copy in copies:
        peer = peer_of(copy)
        for box in copy.box.cut(max_numel):
            if box.numel > room.get(peer, 0):
                buckets.setdefault(peer, []).append([])
                room[peer] = max_numel
            buckets[peer][-1].append(Piece(copy, box))
            room[peer] -= box.numel
    return buckets


def _numel(bucket: Bucket) -> int:
    return sum(piece.box.numel for piece in bucket)


def _pack(bucket: Bucket, src: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    buffer = torch.empty(_numel(bucket), dtype=dtype, device=device)
    start = 0
    for piece in bucket:
        end = start + piece.box.numel
        buffer[start:end].view(piece.box.shape).copy_(piece.copy.src_shard.view(src, piece.box))
        start = end
    return buffer


def _unpack(bucket: Bucket, buffer: Tensor, dst: dict[str, Tensor]) -> None:
    start = 0
    for piece in bucket:
        end = start + piece.box.numel
        for shard in piece.copy.dst_shards:
            shard.view(dst, piece.box).copy_(buffer[start:end].view(piece.box.shape))
        start = end
