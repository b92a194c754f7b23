"""`bench reshard`: weights from a training to a generation layout, ours beside what others do, on four gloo ranks.

All rivals move the same random weights and are timed only when every one has put every bit in its place. Memory that a
rival keeps from one reshard to the next is made beforehand. The bare wire carries what our plan moves as one flat
message for each pair of ranks: that is bytes divided by the bandwidth that these ranks get. It is so near that it takes
turns with ours alone, and more of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from hybridflow.bench import reshard_ours
from hybridflow.bench.gathered_reshard import all_gather
from hybridflow.bench.megatron_reshard import megatron
from hybridflow.bench.reshard_case import DTYPE, Case, Rival, Storages, canonical_weights, filled, first_wrong
from hybridflow.bench.timing import Clocked, Times, in_turns, paired, summed_up
from hybridflow.bench.torch_reshard import checkpointed, memory_folder, redistributed
from hybridflow.local_ranks import LocalRanks
from hybridflow.observe.table import table
from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.plan import TransferPlan, lower_bound_numel
from hybridflow.parallel.world import World

CASES = (Case(Layout(tp=2, pp=2), Layout(dp=4)), Case(Layout(tp=4), Layout(tp=2, dp=2)),
         Case(Layout(pp=4), Layout(tp=2, dp=2)))
OURS, PACKED, WIRE = "ours, shared", "ours, packed", "bare wire"
GATHER, MEGATRON = "all-gather, re-slice", "megatron-core p2p"
DTENSOR, CHECKPOINT = "DTensor redistribute", "checkpoint reload"
ROUNDS, ROUNDS_WITH_WIRE = 9, 31
TIMEOUT_S = 300.0  # of all rounds of one case
LEAST_TO_GATHER = 2.0  # times as fast as all-gather
MOST_TO_WIRE = 1.25  # of the seconds of the bare wire


class WrongWeights(Exception):
    """A rival does not do the work, so that its times say nothing."""


@dataclass(frozen=True)
class Measured:
    """Of one rank, by rival.

    Attributes:
        beside_wire: ours and the wire, in turns without the others.
        wrong: what is not in its place, for each rival of which something is not.
        lower_bound_bytes: that this rank has to receive in our assignment.
    """

    clocked: Clocked
    beside_wire: Clocked
    received_bytes: dict[str, int]
    own_bytes: dict[str, int]
    wrong: dict[str, str]
    notes: list[str]
    lower_bound_bytes: int


def main() -> int:
    """Measure and print. Returns 1 where weights are wrong, and reports no time then; or where a bound is missed."""
    rows, faults, notes = [], [], []
    try:
        with LocalRanks(CASES[0].train.size, ("torch.distributed.checkpoint",), TIMEOUT_S) as ranks:
            for case in CASES:
                measured = measure(ranks, case, ROUNDS, ROUNDS_WITH_WIRE)
                rows += _rows(case, measured)
                faults += missed(case, measured)
                notes += measured[0].notes
    except WrongWeights as error:
        print(f"{error}; nothing is reported")
        return 1
    print(table(("case", "rival", "models moved", "own MiB", "median ms", "least ms", "CPU ms", "to ours", "least"),
                rows))
    print(f"{ROUNDS} rounds in turns, of the wire {ROUNDS_WITH_WIRE} in turns with {OURS} alone. To ours: median and "
          f"least of the ratios round by round to {OURS}; above 1, ours is faster. CPU: all ranks together. Own: "
          "memory beside the training weights, of the rank with the most.")
    print("\n".join([*dict.fromkeys(notes), *faults]))
    return 1 if faults else 0


def measure(ranks: LocalRanks, case: Case, rounds: int, with_wire: int) -> list[Measured]:
    """By rank.

    Raises:
        WrongWeights: some bit is not in its place.
    """
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        measured = ranks.run(race, case, rounds, with_wire, folder)
    require_right(case, measured)
    return measured


def require_right(case: Case, measured: Sequence[Measured]) -> None:
    """Raises:
        WrongWeights: names each rival, rank and tensor.
    """
    wrong = [f"{case}: {name} on rank {rank}: {what}" for rank, one in enumerate(measured)
             for name, what in one.wrong.items()]
    if wrong:
        raise WrongWeights("; ".join(wrong))


def race(world: World, case: Case, rounds: int, with_wire: int, folder: str) -> Measured:
    """On one rank: every rival made, checked, and timed if all ranks are right. Collective."""
    weights = canonical_weights(case.shapes)
    training = filled(case.train_map.shards(world.rank), weights)
    grid = reshard_ours.assigned(case)
    rivals = {OURS: reshard_ours.shared(case, grid, world, training),
              PACKED: reshard_ours.packed(case, grid, world, training),
              GATHER: all_gather(case, world, training)}
    notes = []
    try:
        rivals[MEGATRON] = megatron(case, world, weights)
    except ImportError as error:
        notes.append(f"megatron-core does not reshard here: {error}")
    by_dtensor = redistributed(case, world, weights)
    if by_dtensor is not None:
        rivals[DTENSOR] = by_dtensor
    rivals[CHECKPOINT] = checkpointed(case, world, weights, folder)
    wrong = {name: what for name, rival in rivals.items() if (what := checked(world, rival, weights))}
    del weights  # a whole model on each rank
    plan = TransferPlan(case.train_map, case.map_of(grid), case.nodes)
    steps: dict[str, Callable[[], object]] = {name: rival.run for name, rival in rivals.items()}
    beside_wire = {OURS: steps[OURS], WIRE: reshard_ours.raw_wire(plan, world)}
    if anywhere(bool(wrong)):
        rounds = with_wire = 0
    lower_bound = lower_bound_numel(case.train_map, case.map_of(grid), world.rank) * DTYPE.itemsize
    return Measured(in_turns(world, steps, rounds), in_turns(world, beside_wire, with_wire),
                    {name: rival.received_bytes for name, rival in rivals.items()},
                    {name: rival.own_bytes for name, rival in rivals.items()}, wrong, notes, lower_bound)


def missed(case: Case, measured: Sequence[Measured]) -> list[str]:
    """The bounds that our side misses in one case."""
    bytes_of = {name: sum(one.received_bytes[name] for one in measured) for name in measured[0].received_bytes}
    slower = {name: median(paired([one.clocked for one in measured], name, OURS)) for name in measured[0].clocked}
    faults = [f"{name} is faster: {factor:.2f} of our time" for name, factor in slower.items()
              if name not in (OURS, PACKED) and factor < 1]
    if slower[GATHER] < LEAST_TO_GATHER:
        faults.append(f"all-gather takes {slower[GATHER]:.2f} of our time, not {LEAST_TO_GATHER}")
    to_wire = median(paired([one.beside_wire for one in measured], OURS, WIRE))
    if to_wire > MOST_TO_WIRE:
        faults.append(f"we take {to_wire:.2f} of the bare wire's time, more than {MOST_TO_WIRE}")
    for name in (OURS, PACKED):
        if any(one.received_bytes[name] != one.lower_bound_bytes for one in measured):
            faults.append(f"{name} receives more than the lower bound on some rank")
        if MEGATRON in bytes_of and bytes_of[name] > bytes_of[MEGATRON]:
            faults.append(f"{name} moves {bytes_of[name]} bytes, megatron-core {bytes_of[MEGATRON]}")
    return [f"{case}: {fault}" for fault in faults]


def checked(world: World, rival: Rival, weights: Storages) -> str | None:
    """What one run leaves wrong in memory that held NaN before. Collective."""
    for tensor in rival.own:
        tensor.fill_(torch.nan)
    rival.run()
    return first_wrong(rival.shard_map.shards(world.rank), rival.result, weights)


def anywhere(fault: bool) -> bool:
    """Whether any rank says so. Collective."""
    told = torch.tensor(int(fault))
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told)


def _rows(case: Case, measured: Sequence[Measured]) -> list[tuple[str, ...]]:
    by_rank = [one.clocked for one in measured]
    rows = []
    for name, time in summed_up(by_rank).items():
        moved = sum(one.received_bytes[name] for one in measured) / case.model_bytes
        own = max(one.own_bytes[name] for one in measured) / 2**20
        rows.append((name, f"{moved:.2f}", f"{own:.0f}", *_timed(time, paired(by_rank, name, OURS))))
    beside_wire = [one.beside_wire for one in measured]
    rows.append((WIRE, rows[0][1], "-", *_timed(summed_up(beside_wire)[WIRE], paired(beside_wire, WIRE, OURS))))
    return [(str(case) if first else "", *row) for first, row in zip((True, *[False] * len(rows)), rows)]


def _timed(time: Times, ratios: Sequence[float]) -> tuple[str, ...]:
    seconds = (time.median_wall, time.least_wall, time.median_cpu)
    return (*(f"{s * 1000:.0f}" for s in seconds), f"{median(ratios):.2f}x", f"{min(ratios):.2f}x")
