"""Where a launcher put this process: its rank, and where the ranks meet.

Owns reading torchrun's and srun's variables. Imports no torch, so that a config can be checked for the number of ranks
before anything heavy is loaded. Joining the job is `world`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a launcher put this process. `address` is None where torch finds the rendezvous itself (torchrun).

    Example: Place(rank=5, size=8, local_rank=1, address="node0", port=29500).
    """

    rank: int
    size: int
    local_rank: int
    address: str | None = None
    port: int | None = None


def launched_place(env: Mapping[str, str]) -> Place:
    """Read torchrun's variables, else srun's, else a lone process. torchrun's win where both are set.

    Python started in a batch script without srun is a lone process too: Slurm sets the job's SLURM_NTASKS there, but
    SLURM_STEP_ID only in the tasks of a step, which srun starts.

    Raises:
        ValueError: some but not all of a launcher's variables are set.
    """
    if "WORLD_SIZE" in env or "RANK" in env:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing and env.get("WORLD_SIZE") != "1":
            raise ValueError(f"launched with RANK/WORLD_SIZE but without {', '.join(missing)}: start it with torchrun")
        return Place(int(env.get("RANK", 0)), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", env.get("RANK", 0))))
    if "SLURM_STEP_ID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        missing = [name for name in ("SLURM_PROCID", "MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise ValueError(f"srun started {env['SLURM_NTASKS']} tasks but {', '.join(missing)} is not set: "
                             "export MASTER_ADDR and MASTER_PORT before srun, as launch/slurm.sbatch does")
        return Place(int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env.get("SLURM_LOCALID", 0)),
                     env["MASTER_ADDR"], int(env["MASTER_PORT"]))
    return Place(0, 1, 0)
