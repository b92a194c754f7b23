"""Bounds on what generation has at work at once, and how many blocks of keys and values they come to.

Owns the numbers: memory and speed, never a token. It allocates nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from hybridflow.generation.blocks import BLOCK_TOKENS
from hybridflow.parallel.arithmetic import ceil_div
from hybridflow.parallel.world import World

MEMORY_SHARE = 0.5  # of what is free: training comes back to its part before the cache is given up


@dataclass(frozen=True)
class GenerationLimits:
    """What is at work at once.

    Attributes:
        max_batch_rows: sequences that decode together, over all stages of a pipeline.
        max_cache_bytes: of one rank; None takes half of the memory that is free when weights are filled in.
        max_step_tokens: of one forward: the decoding sequences' tokens, which are always in, and prompt tokens.

    Raises:
        ValueError: a limit is below 1.
    """

    max_batch_rows: int = 256
    max_cache_bytes: int | None = None
    max_step_tokens: int = 2048

    def __post_init__(self) -> None:
        faults = [f"{name} is {value}; it must be at least 1" for name, value in vars(self).items()
                  if value is not None and value < 1]
        if faults:
            raise ValueError("generation: " + "; ".join(faults))

    def num_blocks(self, block_bytes: int, max_length: int, device: torch.device, local_ranks: int) -> int:
        """Blocks of the cache of one rank: what fits, but no more than `max_batch_rows` sequences can fill.

        Args:
            block_bytes: of one block on this rank.
            max_length: tokens of the longest sequence.
            local_ranks: ranks that share the host's memory.
        """
        most = self.max_batch_rows * ceil_div(max_length, BLOCK_TOKENS)
        return min(self.room(device, local_ranks) // block_bytes, most)

    def room(self, device: torch.device, local_ranks: int) -> int:
        """Bytes that the cache of one rank may take."""
        return self.max_cache_bytes or int(free_bytes(device, local_ranks) * MEMORY_SHARE)


DEFAULT_LIMITS = GenerationLimits()


def ranks_of_host(world: World) -> int:
    """Ranks that share this rank's host."""
    return min(world.size, world.nodes.ranks_per_node or world.size)


def free_bytes(device: torch.device, local_ranks: int) -> int:
    """Memory that one rank may still take: of its device, or its equal part of the host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_ranks
