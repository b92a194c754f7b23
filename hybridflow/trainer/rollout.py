"""Rollouts: prompts given to the generation replicas, completions made into a Batch.

Owns who keeps which rows: ranks of the replica that generated them. It never scores and never trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from hybridflow.batch import Batch
from hybridflow.crew import Crew
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.generation.engines.interface import GenerationEngine
from hybridflow.generation.records import Completion, FinishReason, OnEnd, Prompt, SamplingParams
from hybridflow.generation.work_source import Balance, OwnShare, SharedQueue
from hybridflow.hybrid_engine import HybridEngine
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.observe.phases import Phase, PhaseTimer
from hybridflow.packing import split_rows
from hybridflow.parallel.mesh import Grid, Mesh, Outside
from hybridflow.parallel.pipeline import Lane
from hybridflow.parallel.world import World
from hybridflow.protocols import TRANSFERS, Protocol, given
from hybridflow.row_moves import RowsOfRank
from hybridflow.trainer.board import Board
from hybridflow.trainer.roles import TrainedRole
from hybridflow.trainer.row_stream import RowSender, speaker
from hybridflow.trainer.turns import NUM_NUMBERS, OnAnswer, Said, Talk, TurnLoop, talk_metrics, with_talks


@dataclass(frozen=True)
class Rollout:
    """A batch as generated. `finished` is the number of rows that ended at a stop token, over all ranks; `replicas`
    says of each row which replica of generation made it; `talks` are the numbers of each row's `Talk`, where there were
    tools.
    """

    batch: Batch
    finished: int
    replicas: tuple[int, ...]
    talks: tuple[tuple[int, ...], ...] | None = None

    def metrics(self) -> dict[str, float]:
        lengths, prompts = self.batch.response_lengths, self.batch.prompt_lengths
        return ({} if self.talks is None else talk_metrics(self.talks, sum(lengths))) | {
            "rollout/samples": float(len(lengths)),
            "rollout/prompt_tokens_mean": sum(prompts) / len(lengths),
            "rollout/response_tokens_mean": sum(lengths) / len(lengths),
            "rollout/response_tokens_max": float(max(lengths)),
            "rollout/finished_fraction": self.finished / len(lengths),
        }


class Sampler:
    """The actor as it answers: reshard, generate, free. Every call takes the same prompts everywhere, and is made on
    every rank, whether or not it generates.

    Row `i * samples + j` is sample j of prompt i. The ranks of a replica share the rows that it generated out among
    themselves as homes.
    """

    def __init__(self, actor: TrainedRole, hybrid: HybridEngine, seed: int, timer: PhaseTimer, lane: Lane,
                 balance: Balance = Balance.OWN, *, keeps_weights: bool = False, tells_versions: bool = False,
                 turns: TurnLoop | None = None) -> None:
        """
        Args:
            lane: gets a span for each reshard.
            keeps_weights: between rollouts, since no other role needs the memory of the ranks that generate.
            tells_versions: have tokens say under which weights they were drawn, where these may not be the newest.
            turns: of answers that may call tools; None: an answer is one turn.
        """
        self.turns = turns
        self.actor, self.hybrid, self.seed, self.timer, self.lane = actor, hybrid, seed, timer, lane
        self.balance, self.keeps_weights, self.tells_versions = balance, keeps_weights, tells_versions
        self._timed = ExitStack()  # the phase and the span of a reshard under way

    @property
    def world(self) -> World:
        return self.hybrid.mesh.world

    def sample(self, prompts: Sequence[TokenisedPrompt], params: SamplingParams, samples: int) -> Rollout:
        """Answers under the actor's current weights. Collective."""
        self.renew()
        return self.start(prompts, params, samples).finish()

    def renew(self) -> None:
        """Give the generator the actor's current weights, where it does not have them. After an update it has, if the
        update ended in the reshard.
        """
        if not self.hybrid.is_current:
            with self.timer.phase(Phase.RESHARD), self.actor.turn(), self.lane.span("reshard"):
                self.hybrid.fill()

    def start(self, prompts: Sequence[TokenisedPrompt], params: SamplingParams, samples: int,
              listeners: Sequence[Grid] = (), *, more_follows: bool = False,
              ended: OnAnswer | None = None) -> RolloutUnderWay:
        """Answers under the weights that the generator has. Ranks that do not generate go on at once.

        Args:
            listeners: roles that are sent answers as they end (`row_stream`).
            more_follows: the weights are needed once more before they change.
            ended: called for every row as it ends, on one rank: that which speaks for its replica.
        """
        hybrid, dtype = self.hybrid, torch.promote_types(self.actor.blueprint.options.dtype, torch.float32)
        with self.timer.phase(Phase.GENERATE):
            under_way = begin(hybrid.generator, hybrid.mesh, prompts, params, samples=samples, seed=self.seed,
                              version=hybrid.version, dtype=dtype, balance=self.balance, listeners=listeners,
                              ended=ended, turns=self.turns)
            if not (self.keeps_weights or more_follows):
                hybrid.free()
        return replace(under_way, tells_versions=self.tells_versions)

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

    def tell_reshard(self, board: Board) -> None:
        """What the last reshard cost: bytes of all ranks, seconds of the slowest."""
        report = self.hybrid.last_report
        board.summed |= {"reshard/received_bytes": float(report.received_bytes),
                         "reshard/lower_bound_bytes": float(report.lower_bound_bytes)}
        board.largest["reshard/seconds"] = report.seconds


@dataclass(frozen=True)
class RolloutUnderWay:
    """Answers on the ranks that made them; the others do not know of them yet.

    Attributes:
        mesh: of generation.
        requests, groups: of every row, and the place of its prompt in the step.
        by_row: what this rank's replica made.
        dtype: of the log-probs.
        tells_versions: whether tokens say under which weights they were drawn.
        talks: what tools had to do with the answers in `by_row`; None where there are no tools, on all ranks alike.
    """

    mesh: Mesh | Outside
    requests: Sequence[Prompt]
    groups: tuple[int, ...]
    by_row: Mapping[int, Completion]
    dtype: torch.dtype
    tells_versions: bool = False
    talks: Mapping[int, Talk] | None = None

    def finish(self) -> Rollout:
        """Let every rank know the lengths of all answers. Collective over the world: this is where ranks that do not
        generate wait for those that do.
        """
        answered = Answered.exchanged(self.mesh, len(self.requests), self.by_row, self.talks)
        batch = batch_of(self.mesh, self.requests, self.groups, self.by_row, answered, self.dtype,
                         tells_versions=self.tells_versions)
        if self.talks is not None:
            batch = with_talks(batch, self.talks, answered.talks, self.mesh.world.rank)
        return Rollout(batch, answered.finished, answered.replica, None if self.talks is None else answered.talks)


def batch_of(mesh: Mesh | Outside, requests: Sequence[Prompt], groups: tuple[int, ...],
             by_row: Mapping[int, Completion], answered: Answered, dtype: torch.dtype, *,
             tells_versions: bool) -> Batch:
    """Answers whose lengths every rank knows, each row at home on a rank of the replica that made it."""
    world = mesh.world
    home = answered.homes(mesh.grid, world.size)
    mine = [by_row[row] for row in home[world.rank]]
    log_probs = torch.tensor([p for c in mine for p in c.log_probs], dtype=dtype, device=world.device)
    versions = torch.tensor([v for c in mine for v in c.versions], dtype=dtype, device=world.device)
    return Batch(
        prompt_lengths=tuple(len(request.ids) for request in requests),
        response_lengths=answered.lengths,
        groups=groups,
        home=home,
        samples=tuple(Sample(c.prompt_ids, c.response_ids) for c in mine),
        columns=TokenColumns(rollout_log_probs=log_probs, versions=versions if tells_versions else None),
    )


def begin(generator: GenerationEngine | None, mesh: Mesh | Outside, prompts: Sequence[TokenisedPrompt],
          params: SamplingParams, *, samples: int, seed: int, version: int | None, dtype: torch.dtype,
          balance: Balance = Balance.OWN, listeners: Sequence[Grid] = (),
          ended: OnAnswer | None = None, turns: TurnLoop | None = None) -> RolloutUnderWay:
    """Let the replicas of `mesh` answer `prompts` under the weights of `version` (None: whatever they are), in several
    `turns` where there are tools. `ended` is told of whole answers.
    """
    requests = [Prompt(prompt.id, sample, prompt.ids) for prompt in prompts for sample in range(samples)]
    groups = tuple(group for group in range(len(prompts)) for _ in range(samples))
    speaks = isinstance(mesh, Mesh) and speaker(mesh.grid, mesh.coord.dp) == mesh.world.rank
    sender = RowSender(mesh, requests, listeners) if listeners and speaks else None

    def tell(row: int, ids: tuple[int, ...], said: Said | None = None) -> None:
        if ended is not None:
            ended(row, ids, said)
        if sender is not None:
            sender.end(row, ids)

    talks, heard = None if turns is None else {}, speaks and (ended is not None or sender is not None)
    going = turns.begin(mesh, requests, params) if turns is not None and isinstance(mesh, Mesh) else None
    by_row = complete(generator, mesh, requests, params, seed=seed, version=version, balance=balance,
                      ended=(tell if heard else None) if going is None else going.turn_ended)
    if going is not None:
        by_row, talks = going.go_on(generator, by_row, seed=seed, version=version, ended=tell if heard else None)
    if sender is not None:
        sender.finish()
    return RolloutUnderWay(mesh, requests, groups, by_row, dtype, talks=talks)


def complete(generator: GenerationEngine | None, mesh: Mesh | Outside, requests: Sequence[Prompt],
             params: SamplingParams, *, seed: int, version: int | None = None, balance: Balance = Balance.OWN,
             interrupt: Callable[[], bool] | None = None, ended: OnEnd | None = None) -> dict[int, Completion]:
    """Completions that this replica of `mesh` made, by the place of their request, on all of its ranks; none outside of
    the mesh, where nobody waits. Every rank of the world calls it.

    Args:
        generator: None outside of the mesh.
        requests: the same on all replicas.
        version, interrupt, ended: as `GenerationEngine.generate` has them. Interrupted, requests that no replica has
            begun are nowhere.
    """
    replicas = mesh.layout.dp
    handed_out = mesh.world.count() if balance is Balance.SHARED and replicas > 1 else None
    if isinstance(mesh, Outside):
        return {}
    if handed_out is not None:
        source = SharedQueue(requests, params, replicas, handed_out)
    else:
        source = OwnShare(requests, params, replicas, mesh.coord.dp)
    completions = generator.generate(requests, params, seed, expected_version=version, source=source,
                                     interrupt=interrupt, ended=ended)
    return dict(zip(sorted(source.taken), completions, strict=True))


@dataclass(frozen=True)
class Answered:
    """What every rank must know of the answers, wherever they are.

    Attributes:
        replica, lengths: of each row: who generated it, and tokens of its response.
        finished: rows that ended at a stop token.
        talks: of each row `Talk.numbers`.
    """

    replica: tuple[int, ...]
    lengths: tuple[int, ...]
    finished: int
    talks: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def exchanged(cls, mesh: Mesh | Outside, num_rows: int, by_row: Mapping[int, Completion],
                  talks: Mapping[int, Talk] | None = None) -> Answered:
        """From what each replica has, which all of its ranks do. Collective over the world."""
        table = torch.zeros(4 + NUM_NUMBERS, num_rows, dtype=torch.int64)
        if isinstance(mesh, Mesh) and TRANSFERS[Protocol.THREE_D_ALL_MICRO_DP].answers(mesh.coord, mesh.layout):
            told = [(1, mesh.coord.dp, len(c.response_ids), c.finish_reason is FinishReason.STOP,
                     *(talks or {}).get(row, Talk()).numbers()) for row, c in by_row.items()]
            table[:, list(by_row)] = torch.tensor(told, dtype=torch.int64).view(-1, 4 + NUM_NUMBERS).T
        answers, replica, lengths, stopped, *numbers = Crew.whole(mesh.world).sum(table.to(mesh.device)).tolist()
        assert set(answers) <= {1}, "a prompt was handed out never, or twice"
        return cls(tuple(replica), tuple(lengths), sum(stopped), tuple(zip(*numbers)))

    def homes(self, grid: Grid, world_size: int) -> RowsOfRank:
        """Each replica's rows, in order and evenly, over its stages and their tensor ranks."""
        tp, pp, dp = grid.layout.tp, grid.layout.pp, grid.layout.dp
        rows_of = [[row for row, who in enumerate(self.replica) if who == replica] for replica in range(dp)]
        shares = [split_rows(rows, pp * tp) for rows in rows_of]
        parts = [shares[at.dp][at.pp * tp + at.tp] for at in map(grid.coord, grid.ranks)]
        return given(Protocol.DP, grid, parts, world_size)
