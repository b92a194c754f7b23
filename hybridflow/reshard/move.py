"""Moves real tensors as a `Task` plans, on gloo ranks of this host, times it and checks every element.

Owns the storages of the trial. What moves them is `transfer`, as in a run; generation weights share memory with
training weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from hybridflow.local_ranks import LocalRanks
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.checksum import IntegrityError, TransferCheck
from hybridflow.parallel.plan import TransferPlan
from hybridflow.parallel.share import TRAINING, rest_shapes, shared_map
from hybridflow.parallel.transfer import Transfer
from hybridflow.parallel.world import World
from hybridflow.reshard.task import Task

REPEATS = 3
MAX_RANKS = 64
PRELOAD = ("hybridflow.reshard.move",)
SHARED_BYTES = 200 * 10**6  # measured: of all processes together, what the first imported before it was forked
PROCESS_BYTES = 150 * 10**6  # measured: of one process beside weights and messages, while it checks
LABELLED_AT_ONCE = 1 << 20  # elements; labels take eight bytes each, several times over
PRIME = 509  # labels are whole numbers from -254 to 254, exact in every dtype


@dataclass(frozen=True)
class Moved:
    """What a trial showed.

    Attributes:
        seconds: from when all ranks are there until the last is done; the fastest of `REPEATS`.
        received_bytes: by rank of the world, handed to receive calls in one repeat.
        buffer_bytes: by rank, the most that staging buffers took.
        extra_bytes: by rank, memory taken for generation weights and staging buffers.
        wrong: the first wrong region of each rank that has one.
    """

    seconds: float
    received_bytes: tuple[int, ...]
    buffer_bytes: tuple[int, ...]
    extra_bytes: tuple[int, ...]
    wrong: tuple[str, ...]

    @property
    def bytes_per_second(self) -> float:
        """Over all links together."""
        return sum(self.received_bytes) / self.seconds


def move(task: Task) -> Moved:
    """Start a process for each rank of the world, move the weights, and end the processes.

    Raises:
        RankError: a rank failed.
    """
    with LocalRanks(task.world_size, PRELOAD) as ranks:
        trials = ranks.run(trial, replace(task))  # without the maps that it keeps, which cannot be sent
    seconds = [max(times) for times in zip(*(trial.seconds for trial in trials))]
    return Moved(min(seconds), *(tuple(column) for column in zip(*(
        (one.received_bytes, one.buffer_bytes, one.extra_bytes) for one in trials))),
        tuple(one.wrong for one in trials if one.wrong))


def memory_bytes(task: Task) -> int:
    """Of all ranks together, about: training weights, what generation needs besides, what is in flight, and the
    processes themselves.
    """
    shared = shared_map(task.src, task.dst)
    rest = sum(shard.box.numel for rank in shared.ranks for shard in shared.shards(rank)
               if not shard.storage.startswith(TRAINING))
    own = sum(shard.box.numel for rank in task.src.ranks for shard in task.src.shards(rank))
    in_flight = sum(min(task.bucket_bytes, task.travelling_bytes(rank)) for rank in task.plan.ranks)
    return (rest + own) * task.dtype.itemsize + in_flight + SHARED_BYTES + task.world_size * PROCESS_BYTES


def available_bytes() -> int:
    """Memory of this host that processes can have, also by dropping what was kept of files (Linux)."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024  # "20403428 kB"


@dataclass(frozen=True)
class _Trial:
    """One rank's part of `Moved`; `seconds` by repeat, `wrong` empty where all is right."""

    seconds: tuple[float, ...]
    received_bytes: int
    buffer_bytes: int
    extra_bytes: int
    wrong: str


def trial(world: World, task: Task) -> _Trial:
    """Carry out the plan on this rank `REPEATS` times."""
    shared = shared_map(task.src, task.dst)
    plan = TransferPlan(task.src, shared, task.nodes)
    check = TransferCheck(task.src, shared, plan, world, task.dtype)
    transfer = Transfer(plan, world, wire_dtype=task.dtype, bucket_bytes=task.bucket_bytes)
    training, rest = _training(task, world.rank), _rest(task, world.rank)
    storages = {**{TRAINING + name: tensor for name, tensor in training.items()}, **rest}
    seconds = []
    for _ in range(REPEATS):
        for tensor in rest.values():
            tensor.fill_(torch.nan)
        world.barrier()
        start = perf_counter()
        for number in range(transfer.num_rounds):
            transfer.round(number, training, storages)
        world.barrier()
        seconds.append(perf_counter() - start)
    stats = transfer.stats
    wrong = first_wrong(shared.shards(world.rank), storages, shared.shapes)
    unlike = _unlike(check, training, storages, world.rank)  # collective: by all, right or wrong
    wrong = wrong or unlike
    return _Trial(tuple(seconds), stats.received_bytes // REPEATS, stats.peak_buffer_bytes,
                  sum(tensor.nbytes for tensor in rest.values()) + stats.peak_buffer_bytes,
                  f"rank {world.rank}: {wrong}" if wrong else "")


def _unlike(check: TransferCheck, training: dict[str, Tensor], storages: dict[str, Tensor], rank: int) -> str:
    """What checksums show this rank to have wrong, as in runs, where nobody knows what should arrive; else ""."""
    try:
        check.verify(training, storages, version=0)
    except IntegrityError as error:  # all ranks hear of it
        return str(error) if rank in error.ranks else ""
    return ""


def labels(box: Box, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`[*box.shape]`: for each element a number that its tensor's name and its place in the whole tensor decide."""
    index = torch.zeros(box.shape, dtype=torch.int64)
    for dim, (lo, hi) in enumerate(zip(box.lo, box.hi)):
        places = torch.arange(lo, hi) * prod(shape[dim + 1:])
        index += places.view([-1 if other == dim else 1 for other in range(len(shape))])
    # Multiples of a large odd number, of which the high bits decide: neighbours and rows differ.
    mixed = (index + zlib.crc32(box.name.encode())).mul_(2654435761).bitwise_and_(2**32 - 1)
    return mixed.bitwise_right_shift_(8).remainder_(PRIME).sub_(PRIME // 2).to(dtype)


def first_wrong(shards: Sequence[Shard], storages: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> str:
    """Tensor, region and number of wrong elements of the first shard that is not as `labels` has it; else ""."""
    for shard in shards:
        for part in shard.box.cut(LABELLED_AT_ONCE):
            found = shard.view(storages, part)
            wrong = int((found != labels(part, shapes[part.name], found.dtype)).sum())
            if wrong:
                return f"{part.name} {list(part.lo)} to {list(part.hi)} has {wrong} wrong elements"
    return ""


def _training(task: Task, rank: int) -> dict[str, Tensor]:
    """The training storages of a rank, flat, with their labels in them."""
    sizes: dict[str, int] = {}
    for shard in task.src.shards(rank):
        sizes[shard.storage] = max(sizes.get(shard.storage, 0), shard.end_of(shard.box))
    storages = {name: torch.empty(size, dtype=task.dtype) for name, size in sizes.items()}
    for shard in task.src.shards(rank):
        for part in shard.box.cut(LABELLED_AT_ONCE):
            shard.view(storages, part).copy_(labels(part, task.src.shapes[part.name], task.dtype))
    return storages


def _rest(task: Task, rank: int) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=task.dtype)
            for name, shape in rest_shapes(task.src, task.dst, rank).items()} if rank in task.dst else {}
