"""Rollouts: prompts dealt to the generation replicas, completions made into a Batch.

Owns who generates which rows and who keeps them. It never scores and never trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridflow.batch import Batch, RowsOfRank
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.generation.engine import Generator
from hybridflow.generation.records import Completion, FinishReason, Prompt, SamplingParams
from hybridflow.hybrid_engine import HybridEngine
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.observe.phases import Phase, PhaseTimer
from hybridflow.packing import split_rows
from hybridflow.parallel.collectives import all_reduce
from hybridflow.parallel.mesh import Grid, Mesh, everyone
from hybridflow.parallel.pipeline import Lane
from hybridflow.parallel.world import World
from hybridflow.trainer.roles import sum_over_world


@dataclass(frozen=True)
class Rollout:
    """A batch as generated. `finished` is the number of rows that ended at a stop token, over all ranks."""

    batch: Batch
    finished: int

    def metrics(self) -> dict[str, float]:
        lengths, prompts = self.batch.response_lengths, self.batch.prompt_lengths
        return {
            "rollout/samples": float(len(lengths)),
            "rollout/prompt_tokens_mean": sum(prompts) / len(lengths),
            "rollout/response_tokens_mean": sum(lengths) / len(lengths),
            "rollout/response_tokens_max": float(max(lengths)),
            "rollout/finished_fraction": self.finished / len(lengths),
        }


class Sampler:
    """The actor as it answers: reshard, generate, free. Every call is collective and takes the same prompts everywhere.

    Row `i * samples + j` is sample j of prompt i. A replica generates consecutive prompts, and its tensor ranks share
    the rows out among themselves as homes.
    """

    def __init__(self, hybrid: HybridEngine, seed: int, timer: PhaseTimer, lane: Lane) -> None:
        """`lane` gets a span for each reshard."""
        self.hybrid, self.seed, self.timer, self.lane = hybrid, seed, timer, lane
        self._timed = ExitStack()  # the phase and the span of a reshard under way

    @property
    def world(self) -> World:
        return self.hybrid.mesh.world

    def sample(self, prompts: Sequence[TokenisedPrompt], params: SamplingParams, samples: int) -> Rollout:
        """Answers under the actor's current weights."""
        with self.timer.phase(Phase.GENERATE):
            train = self.hybrid.train
            if not self.hybrid.is_current:  # after an update of the actor it is: its schedule ends in the reshard
                with train.on_device(), self.timer.phase(Phase.RESHARD), self.lane.span("reshard"):
                    self.hybrid.fill()
            rollout = answer(self.hybrid.generator, self.hybrid.mesh, prompts, params, samples=samples, seed=self.seed,
                             version=train.version, dtype=torch.promote_types(train.options.dtype, torch.float32))
            self.hybrid.free()
        return rollout

    @property
    def num_buckets(self) -> int:
        """Rounds of the reshard after an update, on this rank."""
        return self.hybrid.num_buckets

    def fill_bucket(self, number: int) -> None:
        """One round of the reshard after an update: what the RESHARD actions of the actor's schedule do. The reshard is
        timed as a whole, since each edge of a phase waits for the device.
        """
        if number == 0:
            self._timed.enter_context(self.timer.phase(Phase.RESHARD))
            self._timed.enter_context(self.lane.span("reshard"))
        self.hybrid.fill_bucket(number)
        if number == self.num_buckets - 1:
            self._timed.close()

    def reshard_metrics(self) -> dict[str, float]:
        """What the last reshard cost: bytes of all ranks, seconds of the slowest. Collective."""
        report, device = self.hybrid.last_report, self.world.device
        counted = torch.tensor([report.received_bytes, report.lower_bound_bytes], dtype=torch.int64, device=device)
        seconds = torch.tensor(report.seconds, dtype=torch.float64, device=device)
        received, bound = sum_over_world(counted, self.world).tolist()
        slowest = all_reduce(seconds, everyone(self.world), dist.ReduceOp.MAX).item()
        return {"reshard/received_bytes": float(received), "reshard/lower_bound_bytes": float(bound),
                "reshard/seconds": slowest}


def answer(generator: Generator, mesh: Mesh, prompts: Sequence[TokenisedPrompt], params: SamplingParams, *,
           samples: int, seed: int, version: int | None, dtype: torch.dtype) -> Rollout:
    """Let the replicas of `mesh` answer `prompts` under the weights of `version` (None: whatever they are). Collective.

    `dtype` is that of the log-probs.
    """
    grid, world = mesh.grid, mesh.world
    replicas = split_rows(range(len(prompts)), grid.layout.dp)
    rows_of_replica = [tuple(p * samples + j for p in share for j in range(samples)) for share in replicas]
    my_rows = rows_of_replica[mesh.coord.dp]
    requests = [Prompt(prompts[row // samples].id, row % samples, prompts[row // samples].ids) for row in my_rows]
    completions = generator.generate(requests, params, seed, expected_version=version)
    home = _homes(grid, world, rows_of_replica)
    by_row = dict(zip(my_rows, completions))
    return _as_batch([by_row[row] for row in home[world.rank]], home, world, prompts, samples, dtype)


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
