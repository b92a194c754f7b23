"""What the ranks of a plan agree on: maxima, which may be of rows that only one rank fills, or of a text's bytes.

Owns the way there, and needs no process group of just these ranks. It never knows what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.collectives import all_reduce
from hybridflow.parallel.mesh import everyone
from hybridflow.parallel.peers import swap
from hybridflow.parallel.world import World

LEAST = torch.iinfo(torch.int64).min


def largest(numbers: Tensor, ranks: Sequence[int], world: World) -> Tensor:
    """`numbers` (int64, on the world's device), in place, each the largest that any of `ranks` has.

    Collective over `ranks` (the same ascending ones on each, this one among them). Where these are not the whole world,
    each tells a rank 1, 2, 4, ... places further what it has heard: log2 of them messages, and a maximum does not mind
    hearing twice.
    """
    if len(ranks) == world.size:
        return all_reduce(numbers, everyone(world), dist.ReduceOp.MAX)
    place, step = ranks.index(world.rank), 1
    while step < len(ranks):
        heard = torch.empty_like(numbers)
        swap({ranks[(place + step) % len(ranks)]: numbers}, {ranks[place - step]: heard}, "what all agree on")
        torch.maximum(numbers, heard, out=numbers)
        step *= 2
    return numbers


def everyones(row: Sequence[int], ranks: Sequence[int], world: World) -> list[list[int]]:
    """The row of each of `ranks`, in their order. Collective over them; all rows have the same length."""
    table = torch.full((len(ranks), len(row)), LEAST, device=world.device)
    table[ranks.index(world.rank)] = torch.tensor(row, device=world.device)
    return largest(table, ranks, world).tolist()


def told(text: str, speaker: int, ranks: Sequence[int], world: World, *, num_bytes: int = 512) -> str:
    """What `speaker` has as its `text`, at most so many bytes of it. Collective over `ranks`."""
    letters = torch.zeros(num_bytes, dtype=torch.int64, device=world.device)
    if world.rank == speaker:
        said = list(text.encode()[:num_bytes])
        letters[: len(said)] = torch.tensor(said, dtype=torch.int64, device=world.device)
    heard = bytes(largest(letters, ranks, world).tolist())
    return heard.rstrip(b"\0").decode(errors="ignore")
