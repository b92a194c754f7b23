"""`bench wire`: a reshard between two hosts of two ranks each, whose link is limited to 1 Gbit/s, beside that link.

Trained is with tensor ranks in a host and one pipeline stage on each. The bound is the time that the link needs for
what the plan sends over it: the same bytes as flat messages between the same ranks, in turns with the reshard.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from hybridflow.bench import reshard_ours
from hybridflow.bench.reshard import anywhere, checked
from hybridflow.bench.reshard_case import DTYPE, Case, canonical_weights, filled
from hybridflow.bench.shaped_link import NoLink, bytes_sent, run_ranks, two_hosts
from hybridflow.bench.timing import Clocked, in_turns, paired, summed_up
from hybridflow.observe.table import table
from hybridflow.parallel.mesh import Grid, Layout
from hybridflow.parallel.nodes import Nodes
from hybridflow.parallel.plan import TransferPlan
from hybridflow.parallel.world import World

RANKS_PER_HOST, RATE = 2, "1gbit"
CASES = tuple(Case(Layout(tp=2, pp=2), generate, nodes=Nodes(RANKS_PER_HOST))
              for generate in (Layout(tp=2, dp=2), Layout(dp=4)))
OURS, PACKED, LINK = "ours, shared", "ours, packed", "the link alone"
ROUNDS = 5
TIMEOUT_S = 300.0
MOST_TO_LINK = 1.3  # of the seconds of the link alone


@dataclass(frozen=True)
class Crossed:
    """Of one rank and case.

    Attributes:
        far_bytes: that this rank sends to the other host, by the plan.
        counted_bytes: that its host sends in one reshard, by the kernel, with headers.
        wrong: what is not in its place.
        groups: ranks of each tensor group of the generation grid.
    """

    clocked: Clocked
    far_bytes: int
    counted_bytes: int
    wrong: str | None
    groups: tuple[tuple[int, ...], ...]


def main() -> int:
    """Measure and print. Returns 1 where weights are wrong or a bound is missed, 2 where there can be no such link."""
    try:
        with two_hosts(RATE) as hosts, tempfile.TemporaryDirectory() as folder:
            run_ranks(hosts, RANKS_PER_HOST, "hybridflow.bench.wire", [folder], TIMEOUT_S)
            by_rank = [[Crossed(**one) for one in json.loads((Path(folder) / str(rank)).read_text())]
                       for rank in range(2 * RANKS_PER_HOST)]
    except NoLink as error:
        print(error)
        return 2
    by_case = list(zip(CASES, zip(*by_rank, strict=True), strict=True))
    faults = [fault for case, crossed in by_case for fault in missed(case, crossed)]
    if not any(one.wrong for _, crossed in by_case for one in crossed):
        print(table(("case", "what", "MB a way", "by the kernel", "median ms", "least ms", "to the link"),
                    [row for case, crossed in by_case for row in _rows(case, crossed)]))
        print(f"{RATE} between 2 hosts of {RANKS_PER_HOST} ranks; {ROUNDS} rounds in turns. To the link: the median of "
              "the ratios round by round.")
    print("\n".join(faults) or f"Tensor groups lie in a host, and every reshard is within {MOST_TO_LINK} of the link.")
    return 1 if faults else 0


def missed(case: Case, crossed: Sequence[Crossed]) -> list[str]:
    """What is not as claimed in one case."""
    wrong = [f"{case}: rank {rank}: {one.wrong} is wrong" for rank, one in enumerate(crossed) if one.wrong]
    if wrong:
        return wrong
    faults = [f"{case}: tensor group {group} spans hosts" for group in crossed[0].groups
              if len({case.nodes.of(rank) for rank in group}) > 1]
    to_link = median(paired([one.clocked for one in crossed], OURS, LINK))
    if to_link > MOST_TO_LINK:
        faults.append(f"{case}: {OURS} takes {to_link:.2f} of the link's time, more than {MOST_TO_LINK}")
    return faults


def race(world: World, case: Case, rounds: int) -> Crossed:
    """On one rank: the reshard made, checked, and timed if all ranks are right. Collective."""
    weights = canonical_weights(case.shapes)
    training = filled(case.train_map.shards(world.rank), weights)
    grid = reshard_ours.assigned(case, tp_within_node=True)
    shared, packed = (make(case, grid, world, training) for make in (reshard_ours.shared, reshard_ours.packed))
    before = bytes_sent()
    wrong = checked(world, shared, weights)
    world.barrier()
    counted = bytes_sent() - before
    wrong = wrong or checked(world, packed, weights)
    del weights
    plan = TransferPlan(case.train_map, case.map_of(grid), case.nodes)
    steps = {OURS: shared.run, PACKED: packed.run, LINK: reshard_ours.raw_wire(plan, world, case.nodes)}
    far = sum(copy.box.numel for copy in plan.of_rank(world.rank)
              if copy.source == world.rank and case.nodes.of(copy.dest) != case.nodes.of(world.rank))
    return Crossed(in_turns(world, steps, 0 if anywhere(wrong is not None) else rounds), far * DTYPE.itemsize, counted,
                   wrong, tuple(_groups(grid)))


def _groups(grid: Grid) -> list[tuple[int, ...]]:
    return grid.lines(lambda at: (at.dp, at.pp))


def _rows(case: Case, crossed: Sequence[Crossed]) -> list[tuple[str, ...]]:
    by_rank = [one.clocked for one in crossed]
    hosts = [crossed[:RANKS_PER_HOST], crossed[RANKS_PER_HOST:]]
    planned = max(sum(one.far_bytes for one in host) for host in hosts) / 1e6
    counted = max(one.counted_bytes for one in crossed) / 1e6
    rows, first = [], str(case)
    for name, time in summed_up(by_rank).items():
        rows.append((first, name, f"{planned:.1f}", f"{counted:.1f}" if name == OURS else "-",
                     f"{time.median_wall * 1000:.0f}", f"{time.least_wall * 1000:.0f}",
                     f"{median(paired(by_rank, name, LINK)):.2f}x"))
        first = ""
    return rows


def _rank(folder: str) -> None:
    """One rank of the job, which leaves what it measured in `folder`."""
    torch.set_num_threads(1)
    world = World.from_env(TIMEOUT_S)
    assert world.nodes == CASES[0].nodes, world.nodes
    crossed = [asdict(race(world, case, ROUNDS)) for case in CASES]
    (Path(folder) / str(world.rank)).write_text(json.dumps(crossed))
    world.barrier()
    world.close()


if __name__ == "__main__":
    _rank(sys.argv[1])
