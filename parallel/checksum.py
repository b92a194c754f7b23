"""Checks of a transfer: every destination element planned once, and arrived as it was sent, under the same version.

Owns checksums, their comparison between ranks, and that all ranks know the outcome. It reads storages through the maps
of those who use them, not through the plan: a plan that was made from a wrong map shows too. Never moves a weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from math import prod

import torch
from torch import Tensor

from hybridflow.parallel.agreement import everyones, largest, told
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.peers import swap
from hybridflow.parallel.plan import Copy, TransferPlan
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.world import World

AT_ONCE = 1 << 20  # elements widened to 64 bits at one time
NAMED_FAULTS, NAMED_RANKS = 5, 16  # in an error
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW_SALT, _COLUMN_SALT = 0x1F83D9AB, 0x5BE0CD19


class IntegrityError(RuntimeError):
    """Weights that are not what they should be. Names tensors, ranks and the version.

    Attributes:
        ranks: those that have a fault of their own.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


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


def plan_faults(plan: TransferPlan, src: ShardMap, dst: ShardMap, rank: int) -> list[str]:
    """What keeps the plan from bringing every destination element of `rank` exactly once, from where it is: elements
    that come from a rank without them, twice, or not at all.

    Args:
        src, dst: of those who use the storages.
    """
    faults: list[str] = []
    missing = defaultdict(list)
    for shard in dst.shards(rank):
        if shard.box.numel:
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
    return faults + [f"{_at(box)} never comes to rank {rank}" for boxes in missing.values() for box in boxes]


class TransferCheck:
    """Compares what has arrived with what was sent: for each copy a checksum, for each pair of ranks one message.
    Making one is collective over the plan's ranks, before anything moves.

    Args:
        src, dst: the maps of those who use the source's and the destination's storages.
        wire_dtype: in which values were sent. Destination storages have it or a wider dtype.
    Raises:
        IntegrityError: on every rank, where the plan itself is wrong on any (`plan_faults`).
    """

    def __init__(self, src: ShardMap, dst: ShardMap, plan: TransferPlan, world: World, wire_dtype: torch.dtype) -> None:
        self._world, self._wire_dtype, self._shapes, self._ranks = world, wire_dtype, dst.shapes, plan.ranks
        self._copies = plan.of_rank(world.rank)
        self._src, self._dst = _by_name(src.shards(world.rank)), _by_name(dst.shards(world.rank))
        self._require_right(plan, src, dst)

    def _require_right(self, plan: TransferPlan, src: ShardMap, dst: ShardMap) -> None:
        if self._world.rank not in self._ranks:
            return
        faults = plan_faults(plan, src, dst, self._world.rank)
        if int(largest(torch.tensor([len(faults)], device=self._world.device), self._ranks, self._world)):
            rows = everyones([len(faults)], self._ranks, self._world)
            faulty = [rank for rank, (number,) in zip(self._ranks, rows) if number]
            raise IntegrityError(f"the plan is wrong: {self._said(faults, faulty)}", tuple(faulty))

    @torch.no_grad()
    def verify(self, src_storages: Mapping[str, Tensor], dst_storages: Mapping[str, Tensor], *, version: int,
               names: Collection[str] | None = None) -> None:
        """Compare, after the last round and before the next change of a source. Collective over the plan's ranks, which
        all agree on whether anything is wrong; a rank outside the plan does nothing.

        Args:
            version: of the weights, as this rank counts it.
            names: the canonical tensors to compare, the same on every rank; None for all. Versions are compared anyway.
        Raises:
            IntegrityError: on every rank, where values or versions differ on any. Names tensors, the ranks that have
                them and the ranks that sent them; on a rank without a fault of its own, the first tensor of another.
            PeerError: a rank is gone, or does not answer in time.
        """
        if self._world.rank not in self._ranks:
            return
        chosen = [copy for copy in self._copies if names is None or copy.box.name in names]
        sent, received = self._by_peer(chosen)

        def sums_of_sources(copies: list[Copy]) -> Tensor:
            return self._sums([self._source(copy, src_storages, dst_storages) for copy in copies])

        head = torch.tensor([version], device=self._world.device)
        mine = {peer: torch.cat([head, sums_of_sources(copies)]) for peer, copies in sent.items()}
        theirs = {peer: head.new_empty(1 + len(copies)) for peer, copies in received.items()}
        swap(mine, theirs, "checksums")
        kept = [copy for copy in chosen if copy.source == copy.dest]
        copies = [*chain.from_iterable(received.values()), *kept]
        expected = torch.cat([*(theirs[peer][1:] for peer in received), sums_of_sources(kept)])
        places = [(number, shards) for number, copy in enumerate(copies) for shards in self._wanted(copy.box)]
        found = self._sums([(copies[number].box, shards, dst_storages) for number, shards in places])
        differs = expected[[number for number, _ in places]] != found
        if self._all_is_well(version, differs):
            return
        raise self._error(version, self._named(version, received, theirs, [copies[number] for number, _ in places],
                                               differs))

    def _by_peer(self, chosen: list[Copy]) -> tuple[dict[int, list[Copy]], dict[int, list[Copy]]]:
        """The chosen copies sent to and received from each peer, also a peer of which none is chosen."""
        sent: dict[int, list[Copy]] = {c.dest: [] for c in self._copies if c.dest != self._world.rank}
        sources = sorted({copy.source for copy in self._copies} - {self._world.rank})
        received: dict[int, list[Copy]] = {source: [] for source in sources}
        for copy in chosen:
            if copy.source != copy.dest:
                (sent[copy.dest] if copy.source == self._world.rank else received[copy.source]).append(copy)
        return sent, received

    def _source(self, copy: Copy, src_storages: Mapping[str, Tensor], dst_storages: Mapping[str, Tensor]) -> _Region:
        """What this rank has sent: of its own at hop 0, else of what it has passed on."""
        if copy.hop == 0:
            return copy.box, self._src[copy.box.name], src_storages
        return copy.box, self._dst[copy.box.name], dst_storages

    def _all_is_well(self, version: int, differs: Tensor) -> bool:
        """Whether no rank has a difference and all have one version. The one time that the host waits for the device.

        Ranks that keep all they need are asked too: no message would show that they are of another version.
        """
        versions = torch.tensor([version, -version], device=self._world.device)
        mine = torch.cat([differs.any().long().view(1), versions])
        wrong, newest, oldest = largest(mine, self._ranks, self._world).tolist()
        return not wrong and newest == -oldest

    def _named(self, version: int, received: dict[int, list[Copy]], theirs: dict[int, Tensor], places: list[Copy],
               differs: Tensor) -> list[str]:
        """This rank's own faults."""
        heads = {peer: int(message[0]) for peer, message in sorted(theirs.items())}
        old = [f"rank {peer} sent {_names(received[peer])} of version {head}" for peer, head in heads.items()
               if head != version]
        wrong = [f"{_at(copy.box)} is not what rank {copy.source} has"
                 for copy, differ in zip(places, differs.tolist(), strict=True) if differ]
        return old + list(dict.fromkeys(wrong))

    def _error(self, version: int, faults: list[str]) -> IntegrityError:
        """What this rank says of its own faults, or of others' if it has none. Collective."""
        rank, ranks = self._world.rank, self._ranks
        rows = everyones([version, len(faults)], ranks, self._world)
        faulty = [each for each, (_, number) in zip(ranks, rows) if number]
        newest = max(its for its, _ in rows)
        stale = {each: f"rank {each} has version {its}, the newest is {newest}"
                 for each, (its, _) in zip(ranks, rows) if its != newest}
        said = [self._said(faults, faulty)] if faulty else []
        if stale:
            said.append(_first(list(stale.values())))
        wrong = tuple(sorted({*faulty, *stale}))
        where = f"wrong on rank {rank}" if rank in wrong else f"wrong on {_numbered(wrong)}, though not on rank {rank}"
        return IntegrityError(f"weights of version {version} are {where}: {'; '.join(said)}", wrong)

    def _said(self, faults: list[str], faulty: list[int]) -> str:
        """This rank's own first faults, or those of the first rank that has some. Collective."""
        mine = _first(faults) if faults else ""
        heard = told(mine, faulty[0], self._ranks, self._world)
        return mine or f"rank {faulty[0]} says that {heard}"

    def _wanted(self, box: Box) -> list[list[Shard]]:
        """The shards that `box` arrived in: each that wants all of it by itself, else those that do together."""
        shards = self._dst[box.name]
        return [[shard] for shard in shards if not box.subtract(shard.box)] or [shards]

    def _sums(self, regions: Sequence[_Region]) -> Tensor:
        """`[regions]`: their checksums.

        Written to one place: small results that are kept one by one, between large ones that are not, keep malloc from
        giving back memory of as much as the weights.
        """
        sums = torch.zeros(len(regions), dtype=torch.int64, device=self._world.device)
        for number, region in enumerate(regions):
            sums[number] = self._sum(*region)
        return sums

    def _sum(self, box: Box, shards: Sequence[Shard], storages: Mapping[str, Tensor]) -> Tensor:
        total, missing = torch.zeros((), dtype=torch.int64, device=self._world.device), [box]
        for shard in shards:
            parts = [part for each in missing if (part := each.intersect(shard.box)) is not None]
            for part in parts:
                values = shard.view(storages, part).to(self._wire_dtype)
                total += checksum(values, part, self._shapes[box.name]).to(total.device)
            missing = _without(missing, shard.box)
        return total


# A box, shards that cover it, and the storages that these are in.
_Region = tuple[Box, Sequence[Shard], Mapping[str, Tensor]]


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


def _first(faults: list[str]) -> str:
    more = f"; and {len(faults) - NAMED_FAULTS} more" if len(faults) > NAMED_FAULTS else ""
    return f"{'; '.join(faults[:NAMED_FAULTS])}{more}"


def _numbered(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - NAMED_RANKS} more" if len(ranks) > NAMED_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:NAMED_RANKS]))}{more}"
