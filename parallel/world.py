"""The processes of a job: who am I, how many are we, and the process groups between us.

Owns the rendezvous and every process group. It never knows what a group is used for: axes live in `mesh`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT_S = 600.0


@dataclass
class World:
    """One process of a job.

    Groups are made on demand and kept, one for each (ranks, purpose); `group` is therefore a collective call that
    every rank makes in the same order. A world of one process has no process group at all.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    timeout: timedelta = timedelta(seconds=DEFAULT_TIMEOUT_S)
    _groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = field(default_factory=dict, repr=False)

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
        place = launched_place(dict(os.environ))
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
        )
        return cls(place.rank, place.size, place.local_rank, device, timeout)

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

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the job; groups must not be used afterwards."""
        self._groups.clear()
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True)
class Place:
    """Where a launcher put this process. `address` is None where torch finds the rendezvous itself (torchrun)."""

    rank: int
    size: int
    local_rank: int
    address: str | None = None
    port: int | None = None


def launched_place(env: dict[str, str]) -> Place:
    """Read torchrun's variables, else srun's, else a lone process. torchrun's win where both are set.

    Raises:
        ValueError: some but not all of a launcher's variables are set.
    """
    if "WORLD_SIZE" in env or "RANK" in env:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing and env.get("WORLD_SIZE") != "1":
            raise ValueError(f"launched with RANK/WORLD_SIZE but without {', '.join(missing)}: start it with torchrun")
        return Place(int(env.get("RANK", 0)), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", env.get("RANK", 0))))
    if int(env.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in env:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise ValueError(f"srun started {env['SLURM_NTASKS']} tasks but {', '.join(missing)} is not set: "
                             "export both before srun, as launch/slurm.sbatch does")
        return Place(int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env.get("SLURM_LOCALID", 0)),
                     env["MASTER_ADDR"], int(env["MASTER_PORT"]))
    return Place(0, 1, 0)


def default_device(local_rank: int) -> torch.device:
    """This rank's accelerator where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")
