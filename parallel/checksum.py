"""Checks of a transfer: every destination element planned once, and arrived as it was sent, under the same version.

Owns checksums and their comparison between ranks. It reads storages through the maps of those who use them, not through
the plan: a plan that was made from a wrong map shows too. Never moves a weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.plan import Copy, TransferPlan
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.world import World

AT_ONCE = 1 << 20  # elements widened to 64 bits at one time
NAMED_FAULTS = 5  # in an error
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW_SALT, _COLUMN_SALT = 0x1F83D9AB, 0x5BE0CD19


class IntegrityError(RuntimeError):
    """Weights that are not what they should be. Names tensors, ranks and the version."""


def checksum(values: Tensor, box: Box, shape: Sequence[int]) -> Tensor:
    """Of the elements `values` of `box` of a canonical tensor of `shape`: an int64 scalar on their device.

    Sum over elements, modulo 2^64, of the element's scrambled bits times a(row) b(column), odd pseudo-random numbers of
    its place in the canonical tensor (all dims but the last are one row number): checksums of disjoint boxes add up to
    that of their union, whatever the cut. NaN and -0.0 are bits like others. (Plain bits would not do: two flipped
    signs are 2^63 times an odd number each, and cancel.)
    """
    assert values.shape == box.shape, (values.shape, box)
    rows = values.reshape(-1, values.shape[-1])
    columns = _odd(torch.arange(box.lo[-1], box.hi[-1], device=values.device), _COLUMN_SALT)
    places = _odd(_row_numbers(box, shape, values.device), _ROW_SALT)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    step = max(1, AT_ONCE // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        bits = rows[start : start + step].view(_BITS[values.element_size()]).long()
        bits = _scrambled(bits)
        total += ((bits * columns).sum(1) * places[start : start + step]).sum()
    return total


def sampled(names: Iterable[str], version: int, one_in: int = 16) -> frozenset[str]:
    """Every `one_in`-th of the names, others with each version, so that all have their turn."""
    return frozenset(name for place, name in enumerate(names) if (place + version) % one_in == 0)


def check_plan(plan: TransferPlan, src: ShardMap, dst: ShardMap, rank: int) -> None:
    """That the plan brings every destination element of `rank` exactly once, from where it is.

    Args:
        src, dst: of those who use the storages.
    Raises:
        IntegrityError: an element comes from a rank that does not hold it, twice, or not at all; all such tensors.
    """
    faults: list[str] = []
    missing = defaultdict(list)
    for shard in dst.shards(rank):
        missing[shard.box.name] = _without(missing[shard.box.name], shard.box) + [shard.box]
    for copy in plan.of_rank(rank):
        name = copy.box.name
        if copy.dest == rank:
            wanted = sum(part.numel for box in missing[name] if (part := box.intersect(copy.box)) is not None)
            if wanted != copy.box.numel:
                faults.append(f"{_at(copy.box)} comes to rank {rank} twice, or without being wanted")
            missing[name] = _without(missing[name], copy.box)
        holder = src if copy.hop == 0 else dst
        if _without([copy.box], *(shard.box for shard in holder.shards(copy.source) if shard.box.name == name)):
            faults.append(f"{_at(copy.box)} is to come from rank {copy.source}, which does not have it")
    faults += [f"{_at(box)} never comes to rank {rank}" for boxes in missing.values() for box in boxes]
    _raise(faults, "the plan is wrong")


class TransferCheck:
    """Compares what has arrived with what was sent: for each copy a checksum, for each pair of ranks one message.

    Args:
        src, dst: the maps of those who use the source's and the destination's storages.
        wire_dtype: in which values were sent. Destination storages have it or a wider dtype.
    Raises:
        IntegrityError: the plan itself is wrong on this rank (`check_plan`).
    """

    def __init__(self, src: ShardMap, dst: ShardMap, plan: TransferPlan, world: World, wire_dtype: torch.dtype) -> None:
        self._world, self._wire_dtype, self._shapes = world, wire_dtype, dst.shapes
        self._copies = plan.of_rank(world.rank)
        self._src, self._dst = _by_name(src.shards(world.rank)), _by_name(dst.shards(world.rank))
        check_plan(plan, src, dst, world.rank)

    @torch.no_grad()
    def verify(self, src_storages: Mapping[str, Tensor], dst_storages: Mapping[str, Tensor], *, version: int,
               names: Collection[str] | None = None) -> None:
        """Compare, after the last round and before the next change of a source. Collective over the plan's peers.

        Args:
            version: of the weights, as this rank counts it.
            names: the canonical tensors to compare, the same on every rank; None for all. Versions are compared anyway.
        Raises:
            IntegrityError: values or versions differ. Names tensors, this rank and the rank that sent.
        """
        chosen = [copy for copy in self._copies if names is None or copy.box.name in names]
        sent, received = self._by_peer(chosen)
        mine = {peer: self._message(version, [self._source(copy, src_storages, dst_storages) for copy in copies])
                for peer, copies in sent.items()}
        theirs = {peer: torch.empty(1 + len(copies), dtype=torch.int64, device=self._world.device)
                  for peer, copies in received.items()}
        self._exchange(mine, theirs)
        faults: list[str] = []
        for peer, copies in sorted(received.items()):
            their_version, *sums = theirs[peer].tolist()
            if their_version != version:
                faults.append(f"rank {peer} sent {_names(copies)} of version {their_version}")
            faults += self._differing(copies, sums, dst_storages)
        kept = [copy for copy in chosen if copy.source == copy.dest]
        if kept:
            sums = torch.stack([self._source(copy, src_storages, dst_storages) for copy in kept]).tolist()
            faults += self._differing(kept, sums, dst_storages)
        _raise(faults, f"weights of version {version} are wrong on rank {self._world.rank}")

    def _by_peer(self, chosen: list[Copy]) -> tuple[dict[int, list[Copy]], dict[int, list[Copy]]]:
        """The chosen copies sent to and received from each peer, also a peer of which none is chosen."""
        sent: dict[int, list[Copy]] = {c.dest: [] for c in self._copies if c.dest != self._world.rank}
        received: dict[int, list[Copy]] = {c.source: [] for c in self._copies if c.source != self._world.rank}
        for copy in chosen:
            if copy.source != copy.dest:
                (sent[copy.dest] if copy.source == self._world.rank else received[copy.source]).append(copy)
        return sent, received

    def _message(self, version: int, sums: list[Tensor]) -> Tensor:
        head = torch.tensor(version, dtype=torch.int64, device=self._world.device)
        return torch.stack([head, *(each.to(self._world.device) for each in sums)])

    @staticmethod
    def _exchange(mine: dict[int, Tensor], theirs: dict[int, Tensor]) -> None:
        ops = [dist.P2POp(dist.irecv, message, peer) for peer, message in sorted(theirs.items())]
        ops += [dist.P2POp(dist.isend, message, peer) for peer, message in sorted(mine.items())]
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()

    def _source(self, copy: Copy, src_storages: Mapping[str, Tensor], dst_storages: Mapping[str, Tensor]) -> Tensor:
        """Of what this rank has sent: of its own at hop 0, else of what it has passed on."""
        if copy.hop == 0:
            return self._sum(copy.box, self._src[copy.box.name], src_storages)
        return self._sum(copy.box, self._dst[copy.box.name], dst_storages)

    def _differing(self, copies: list[Copy], sums: list[int], storages: Mapping[str, Tensor]) -> list[str]:
        faults = []
        for copy, expected in zip(copies, sums, strict=True):
            if any(total.item() != expected for total in self._arrived(copy.box, storages)):
                faults.append(f"{_at(copy.box)} is not what rank {copy.source} has")
        return faults

    def _arrived(self, box: Box, storages: Mapping[str, Tensor]) -> list[Tensor]:
        """Of `box` in every place that wants it."""
        shards = self._dst[box.name]
        whole = [shard for shard in shards if not box.subtract(shard.box)]
        return [self._sum(box, [shard], storages) for shard in whole] or [self._sum(box, shards, storages)]

    def _sum(self, box: Box, shards: Sequence[Shard], storages: Mapping[str, Tensor]) -> Tensor:
        total, missing = torch.zeros((), dtype=torch.int64, device=self._world.device), [box]
        for shard in shards:
            parts = [part for each in missing if (part := each.intersect(shard.box)) is not None]
            for part in parts:
                values = shard.view(storages, part).to(self._wire_dtype)
                total += checksum(values, part, self._shapes[box.name]).to(total.device)
            missing = _without(missing, shard.box)
        return total


def _odd(numbers: Tensor, salt: int) -> Tensor:
    """Odd 64-bit numbers that look random (integer overflow wraps)."""
    return _scrambled(_scrambled(numbers + salt)) | 1


def _scrambled(numbers: Tensor) -> Tensor:
    """One round of multiply and shift, which carries high bits to low places; one to one."""
    mixed = numbers * -7046029254386353131
    return mixed ^ (mixed >> 32)


def _row_numbers(box: Box, shape: Sequence[int], device: torch.device) -> Tensor:
    """Of the rows of `box` (all dims but the last), in the canonical tensor."""
    numbers = torch.zeros(1, dtype=torch.int64, device=device)
    for dim in range(len(shape) - 1):
        along = torch.arange(box.lo[dim], box.hi[dim], device=device) * prod(shape[dim + 1 : -1])
        numbers = (numbers[:, None] + along).flatten()
    return numbers


def _by_name(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    found: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        found[shard.box.name].append(shard)
    return found


def _without(boxes: list[Box], *others: Box) -> list[Box]:
    for other in others:
        boxes = [rest for box in boxes for rest in box.subtract(other)]
    return boxes


def _at(box: Box) -> str:
    return f"{box.name}[{box.lo}:{box.hi}]"


def _names(copies: list[Copy]) -> str:
    names = list(dict.fromkeys(copy.box.name for copy in copies))
    more = f" and {len(names) - NAMED_FAULTS} more" if len(names) > NAMED_FAULTS else ""
    return ", ".join(names[:NAMED_FAULTS]) + more or "weights"


def _raise(faults: list[str], what: str) -> None:
    if faults:
        more = f"; and {len(faults) - NAMED_FAULTS} more" if len(faults) > NAMED_FAULTS else ""
        raise IntegrityError(f"{what}: {'; '.join(faults[:NAMED_FAULTS])}{more}")
