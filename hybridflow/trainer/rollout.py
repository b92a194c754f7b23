"""Rollouts: prompts given to the generation replicas, completions made into a Batch.

Owns who keeps which rows: ranks of the replica that generated them. It never scores and never trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridflow.batch import Batch, RowsOfRank
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.generation.engines.interface import GenerationEngine
from hybridflow.generation.records import Completion, FinishReason, Prompt, SamplingParams
from hybridflow.generation.work_source import Balance, OwnShare, SharedQueue
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

    Row `i * samples + j` is sample j of prompt i. The ranks of a replica share the rows that it generated out among
    themselves as homes.
    """

    def __init__(self, hybrid: HybridEngine, seed: int, timer: PhaseTimer, lane: Lane,
                 balance: Balance = Balance.OWN) -> None:
        """`lane` gets a span for each reshard."""
        self.hybrid, self.seed, self.timer, self.lane, self.balance = hybrid, seed, timer, lane, balance
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
                             version=train.version, dtype=torch.promote_types(train.options.dtype, torch.float32),
                             balance=self.balance)
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


def answer(generator: GenerationEngine, mesh: Mesh, prompts: Sequence[TokenisedPrompt], params: SamplingParams, *,
           samples: int, seed: int, version: int | None, dtype: torch.dtype, balance: Balance = Balance.OWN) -> Rollout:
    """Let the replicas of `mesh` answer `prompts` under the weights of `version` (None: whatever they are). Collective.

    `dtype` is that of the log-probs.
    """
    requests = [Prompt(prompt.id, sample, prompt.ids) for prompt in prompts for sample in range(samples)]
    by_row = complete(generator, mesh, requests, params, seed=seed, version=version, balance=balance)
    answered = Answered.exchanged(mesh, len(requests), by_row)
    home = answered.homes(mesh.grid)
    mine = [by_row[row] for row in home[mesh.world.rank]]
    batch = Batch(
        prompt_lengths=tuple(len(request.ids) for request in requests),
        response_lengths=answered.lengths,
        groups=tuple(group for group in range(len(prompts)) for _ in range(samples)),
        home=home,
        samples=tuple(Sample(c.prompt_ids, c.response_ids) for c in mine),
        columns=TokenColumns(rollout_log_probs=torch.tensor([p for c in mine for p in c.log_probs], dtype=dtype,
                                                            device=mesh.device)),
    )
    return Rollout(batch, answered.finished)


def complete(generator: GenerationEngine, mesh: Mesh, requests: Sequence[Prompt], params: SamplingParams, *, seed: int,
             version: int | None = None, balance: Balance = Balance.OWN,
             interrupt: Callable[[], bool] | None = None) -> dict[int, Completion]:
    """Completions that this replica of `mesh` made, by the place of their request, on all of its ranks. Collective.

    Args:
        requests: the same on all replicas.
        version, interrupt: as `GenerationEngine.generate` has them. Interrupted, requests that no replica has begun are
            nowhere.
    """
    replicas = mesh.layout.dp
    if balance is Balance.SHARED and replicas > 1:
        source = SharedQueue(requests, params, replicas, mesh.world.count())
    else:
        source = OwnShare(requests, params, replicas, mesh.coord.dp)
    completions = generator.generate(requests, params, seed, expected_version=version, source=source,
                                     interrupt=interrupt)
    return dict(zip(sorted(source.taken), completions, strict=True))


@dataclass(frozen=True)
class Answered:
    """What every rank must know of the answers, wherever they are.

    Attributes:
        replica, lengths: of each row: who generated it, and tokens of its response.
        finished: rows that ended at a stop token.
    """

    replica: tuple[int, ...]
    lengths: tuple[int, ...]
    finished: int

    @classmethod
    def exchanged(cls, mesh: Mesh, num_rows: int, by_row: Mapping[int, Completion]) -> Answered:
        """From what each replica has, which all of its ranks do. Collective."""
        table = torch.zeros(4, num_rows, dtype=torch.int64)
        if (mesh.coord.tp, mesh.coord.pp) == (0, 0):  # one rank speaks for the replica
            told = [(1, mesh.coord.dp, len(c.response_ids), c.finish_reason is FinishReason.STOP)
                    for c in by_row.values()]
            table[:, list(by_row)] = torch.tensor(told, dtype=torch.int64).view(-1, 4).T
        answers, replica, lengths, stopped = sum_over_world(table.to(mesh.device), mesh.world).tolist()
        assert set(answers) <= {1}, "a prompt was handed out never, or twice"
        return cls(tuple(replica), tuple(lengths), sum(stopped))

    def homes(self, grid: Grid) -> RowsOfRank:
        """Each replica's rows, in order and evenly, over its stages and their tensor ranks."""
        tp, pp, dp = grid.layout.tp, grid.layout.pp, grid.layout.dp
        rows_of = [[row for row, who in enumerate(self.replica) if who == replica] for replica in range(dp)]
        shares = [split_rows(rows, pp * tp) for rows in rows_of]
        return tuple(shares[at.dp][at.pp * tp + at.tp] for at in map(grid.coord, range(grid.layout.size)))
