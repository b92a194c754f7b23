"""The processes of a job: who am I, how many are we, and the process groups between us.

Owns the rendezvous and every process group. It never knows what a group is used for: axes live in `mesh`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from hybridflow.parallel.nodes import ONE_NODE, Nodes
from hybridflow.parallel.outbox import Outbox
from hybridflow.parallel.place import Place, launched_place
from hybridflow.parallel.shared_count import SharedCount

DEFAULT_TIMEOUT_S = 600.0


@dataclass
class World:
    """One process of a job.

    Groups are made on demand and kept, one for each (ranks, purpose); `group` is therefore a collective call that
    every rank makes in the same order. A world of one process has no process group at all.

    Attributes:
        nodes: which ranks share a node, the same on every rank.
        outbox: of messages that nobody waits for where they are sent.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    timeout: timedelta = timedelta(seconds=DEFAULT_TIMEOUT_S)
    nodes: Nodes = ONE_NODE
    outbox: Outbox = field(default_factory=Outbox, repr=False)
    _groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = field(default_factory=dict, repr=False)
    _num_counts: int = field(default=0, repr=False)

    @classmethod
    def single(cls, device: torch.device | None = None) -> World:
        """A job of one process, which never communicates."""
        return cls(rank=0, size=1, local_rank=0, device=device or default_device(0))

    @classmethod
    def from_env(cls, timeout_s: float = DEFAULT_TIMEOUT_S) -> World:
        """Join the job that torchrun or srun started; a process started alone is a world of one.

        Raises:
            ValueError: a launcher's variables are incomplete (the missing names are listed).
        """
        place = launched_place(os.environ)
        if place.size == 1:
            return cls.single(default_device(place.local_rank))
        device = default_device(place.local_rank)
        timeout = timedelta(seconds=timeout_s)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{place.address}:{place.port}" if place.address else "env://",
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
            # Communicators are made here and not in the middle of a schedule, where some ranks have nothing to send.
            device_id=device if device.type == "cuda" else None,
        )
        return cls(place.rank, place.size, place.local_rank, device, timeout, _agreed_nodes(place, device))

    def group(self, ranks: tuple[int, ...], purpose: str = "") -> dist.ProcessGroup | None:
        """The process group of `ranks` (None for a single rank); `purpose` keeps groups of equal ranks apart.

        Every rank of the world calls this, in the same order, whether or not it is in `ranks`.
        """
        if len(ranks) == 1:
            return None
        key = (tuple(sorted(ranks)), purpose)
        if key not in self._groups:
            self._groups[key] = dist.new_group(sorted(ranks), timeout=self.timeout)
        return self._groups[key]

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """The group of all ranks, None in a world of one."""
        return None if self.size == 1 else dist.group.WORLD

    def count(self) -> SharedCount:
        """A new number that all ranks can raise. Every rank of the world calls this, in the same order; ranks do not
        wait for each other.
        """
        self._num_counts += 1
        # The store of the job's rendezvous; torch has no other name for it.
        store = None if self.size == 1 else dist.distributed_c10d._get_default_store()
        return SharedCount(store, f"hybridflow/count/{self._num_counts}")

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the job; groups must not be used afterwards."""
        self._groups.clear()
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def default_device(local_rank: int) -> torch.device:
    """This rank's accelerator where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def _agreed_nodes(place: Place, device: torch.device) -> Nodes:
    """The nodes of the whole job, from what each rank's launcher told it; all near where that does not fit `Nodes`.

    A last node may be told a smaller number, so the largest counts. Collective.
    """
    told = place.ranks_per_node or 0
    most, least = _extremes(told, device)
    fits = least > 0 and place.rank % most == place.local_rank
    return Nodes(most) if _extremes(int(fits), device)[1] else ONE_NODE


def _extremes(number: int, device: torch.device) -> tuple[int, int]:
    """The largest and the smallest of all ranks' numbers. Collective."""
    both = torch.tensor([number, -number], device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    largest, smallest = both.tolist()
    return largest, -smallest
