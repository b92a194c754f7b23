"""Where a launcher put this process: its rank, and where the ranks meet.

Owns reading torchrun's and srun's variables. Imports no torch, so that a config can be checked for the number of ranks
before anything heavy is loaded. Joining the job is `world`'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a launcher put this process. `address` is None where torch finds the rendezvous itself (torchrun).

    Attributes:
        ranks_per_node: the most ranks that a node has, as far as this one's launcher knows; None where it does not say.
    Example: Place(rank=5, size=8, local_rank=1, address="node0", port=29500, ranks_per_node=4).
    """

    rank: int
    size: int
    local_rank: int
    address: str | None = None
    port: int | None = None
    ranks_per_node: int | None = None


def launched_place(env: Mapping[str, str]) -> Place:
    """Read torchrun's variables, else srun's, else a lone process. torchrun's win where both are set.

    Python started in a batch script without srun is a lone process too: Slurm sets the job's SLURM_NTASKS there, but
    SLURM_STEP_ID only in the tasks of a step, which srun starts.

    Raises:
        ValueError: some but not all of a launcher's variables are set, or one that should be a number is none.
    """
    if "WORLD_SIZE" in env or "RANK" in env:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing and env.get("WORLD_SIZE") != "1":
            raise ValueError(f"launched with RANK/WORLD_SIZE but without {', '.join(missing)}: start it with torchrun")
        rank = _number(env, "RANK", 0)
        return Place(rank, _number(env, "WORLD_SIZE", 1), _number(env, "LOCAL_RANK", rank),
                     ranks_per_node=_number(env, "LOCAL_WORLD_SIZE", 0) or None)
    if "SLURM_STEP_ID" in env and _number(env, "SLURM_NTASKS", 1) > 1:
        missing = [name for name in ("SLURM_PROCID", "MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise ValueError(f"srun started {env['SLURM_NTASKS']} tasks but {', '.join(missing)} is not set: "
                             "export MASTER_ADDR and MASTER_PORT before srun, as launch/slurm.sbatch does")
        return Place(_number(env, "SLURM_PROCID", 0), _number(env, "SLURM_NTASKS", 1), _number(env, "SLURM_LOCALID", 0),
                     env["MASTER_ADDR"], _number(env, "MASTER_PORT", 0), _most_tasks(env))
    return Place(0, 1, 0)


def _number(env: Mapping[str, str], name: str, missing: int) -> int:
    """A variable that is a whole number.

    Raises:
        ValueError: it is set to something else.
    """
    text = env.get(name, str(missing))
    if not text.isdecimal():
        raise ValueError(f"the environment has {name}={text!r}, which is no number: start it with torchrun or srun")
    return int(text)


def _most_tasks(env: Mapping[str, str]) -> int | None:
    """The most tasks of a step on one node: 4 where srun says "4(x2),3"; None where it says nothing."""
    counts = re.findall(r"(\d+)(?:\(x\d+\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return max(map(int, counts), default=None)
