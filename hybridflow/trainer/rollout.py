"""Generation for a step: prompts dealt to the generation replicas, completions made into a Batch.

Owns who generates which rows and who keeps them. It never scores and never trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import torch

from hybridflow.batch import Batch, RowsOfRank, split_rows
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.generation.engine import Generator
from hybridflow.generation.records import Completion, FinishReason, Prompt, SamplingParams
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.parallel.mesh import Grid
from hybridflow.parallel.world import World
from hybridflow.trainer.roles import sum_over_world


@dataclass(frozen=True)
class Rollout:
    """A batch as generated. `finished` is the number of rows that ended at a stop token, over all ranks."""

    batch: Batch
    finished: int


def generate_rollout(generator: Generator, grid: Grid, world: World, prompts: Sequence[TokenisedPrompt], *,
                     samples: int, params: SamplingParams, seed: int, version: int, dtype: torch.dtype) -> Rollout:
    """Sample `samples` responses to every prompt. Collective: every rank passes the same prompts.

    Row `i * samples + j` is sample j of prompt i. A replica generates consecutive prompts, and its tensor ranks share
    the rows out among themselves as homes.
    """
    replicas = split_rows(range(len(prompts)), grid.layout.dp)
    rows_of_replica = [tuple(p * samples + j for p in share for j in range(samples)) for share in replicas]
    mine = grid.coord(world.rank)
    requests = [Prompt(prompts[row // samples].id, row % samples, prompts[row // samples].ids)
                for row in rows_of_replica[mine.dp]]
    completions = generator.generate(requests, params, seed, expected_version=version)
    home = _homes(grid, world, rows_of_replica)
    kept = {row: completion for row, completion in zip(rows_of_replica[mine.dp], completions)}
    return _as_batch([kept[row] for row in home[world.rank]], home, world, prompts, samples, dtype)


def _homes(grid: Grid, world: World, rows_of_replica: list[tuple[int, ...]]) -> RowsOfRank:
    places = [grid.coord(rank) for rank in range(world.size)]
    return tuple(split_rows(rows_of_replica[at.dp], grid.layout.tp)[at.tp] for at in places)


def _as_batch(mine: list[Completion], home: RowsOfRank, world: World, prompts: Sequence[TokenisedPrompt],
              samples: int, dtype: torch.dtype) -> Rollout:
    table = torch.zeros(2, len(prompts) * samples, dtype=torch.int64, device=world.device)
    rows = list(home[world.rank])
    table[0, rows] = torch.tensor([len(c.response_ids) for c in mine], dtype=torch.int64, device=world.device)
    table[1, rows] = torch.tensor([c.finish_reason is FinishReason.STOP for c in mine], dtype=torch.int64,
                                  device=world.device)
    lengths, stopped = sum_over_world(table, world).tolist()
    log_probs = torch.tensor([p for c in mine for p in c.log_probs], dtype=dtype, device=world.device)
    batch = Batch(
        prompt_lengths=tuple(len(prompt.ids) for prompt in prompts for _ in range(samples)),
        response_lengths=tuple(lengths),
        groups=tuple(group for group in range(len(prompts)) for _ in range(samples)),
        home=home,
        samples=tuple(Sample(c.prompt_ids, c.response_ids) for c in mine),
        columns=TokenColumns(rollout_log_probs=log_probs),
    )
    return Rollout(batch, sum(stopped))
