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


@torch.no_grad()
def execute(plan: TransferPlan, world: World, src: dict[str, Tensor], dst: dict[str, Tensor], *,
            wire_dtype: torch.dtype, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> TransferStats:
    """Fill this rank's destination storages. Collective over the ranks of the plan.

    Args:
        src, dst: storages of this rank by name, as the plan's shards name them.
        wire_dtype: the dtype on the wire; values are cast to it by the sender and from it by the receiver.
        bucket_bytes: bound on the bytes of all buffers in flight on one rank (tensors are cut to fit).
    """
    mine = plan.of_rank(world.rank)
    for copy in mine:
        if copy.source == copy.dest == world.rank:
            source = copy.src_shard.view(src, copy.box)
            for shard in copy.dst_shards:
                shard.view(dst, copy.box).copy_(source)
    per_wire = max(1, bucket_bytes // wire_dtype.itemsize // max(1, plan.max_peers))
    sends = _buckets([c for c in mine if c.source == world.rank != c.dest], per_wire, lambda c: c.dest)
    receives = _buckets([c for c in mine if c.dest == world.rank != c.source], per_wire, lambda c: c.source)
    stats = TransferStats()
    for step in range(max([len(b) for b in (*sends.values(), *receives.values())], default=0)):
        _round({p: b[step] for p, b in sends.items() if step < len(b)},
               {p: b[step] for p, b in receives.items() if step < len(b)}, src, dst, wire_dtype, world, stats)
    return stats


def _round(sends: dict[int, Bucket], receives: dict[int, Bucket], src: dict[str, Tensor], dst: dict[str, Tensor],
           dtype: torch.dtype, world: World, stats: TransferStats) -> None:
    incoming = {peer: torch.empty(_numel(bucket), dtype=dtype, device=world.device)
                for peer, bucket in receives.items()}
    outgoing = {peer: _pack(bucket, src, dtype) for peer, bucket in sends.items()}
    ops = [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in incoming.items()]
    ops += [dist.P2POp(dist.isend, buffer, peer) for peer, buffer in outgoing.items()]
    stats.received_bytes += sum(b.numel() * b.element_size() for b in incoming.values())
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for peer, buffer in incoming.items():
        _unpack(receives[peer], buffer, dst)


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


def _pack(bucket: Bucket, src: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    first = bucket[0].copy.src_shard.view(src, bucket[0].box)
    buffer = torch.empty(_numel(bucket), dtype=dtype, device=first.device)
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
