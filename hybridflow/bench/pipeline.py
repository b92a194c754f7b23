"""`bench pipeline`: our executor's 1F1B step beside torch's `Schedule1F1B` and megatron-core's.

The same torch modules, micro-batches and process run all three; only who drives them differs. One step is the forwards
and backwards of all micro-batches with gradients added up in `param.grad`; there is no optimizer. Nothing is timed
before the three have given the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hybridflow.bench.megatron_schedule import megatron_step
from hybridflow.bench.plain_stage import PlainStage, Shape, Tokens, micro_batches, summed_loss
from hybridflow.bench.timing import Clocked, Times, in_turns, summed_up
from hybridflow.local_ranks import LocalRanks
from hybridflow.observe.table import ratio, table
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.pipeline import PipelineRunner
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.schedules.training import build
from hybridflow.parallel.world import World

OURS, TORCH, MEGATRON = "hybridflow", "torch", "megatron"
SHAPES = (
    Shape("overhead", hidden=32, layers=1, tokens=16, micro_batches=32),
    Shape("small", hidden=128, layers=1, tokens=64, micro_batches=16),
    Shape("medium", hidden=256, layers=1, tokens=128, micro_batches=8, heads=4),
)
ROUNDS = 15
TIMEOUT_S = 300.0  # of all rounds of one size
TOLERANCE = 1e-6  # of the difference of two gradients to their norm: three orders of adding the same fp32 terms
Step = Callable[[], object]


class WrongGradient(Exception):
    """Rivals do not compute the same, so that their times say nothing."""


def main() -> int:
    """Measure and print. Returns 1 where gradients differ, and reports no time then."""
    rows = []
    try:
        for pp in (2, 4):
            with LocalRanks(pp, ("torch.distributed.pipelining",), TIMEOUT_S) as ranks:
                for shape in SHAPES:
                    rows += case(ranks, shape, ROUNDS)
    except WrongGradient as error:
        print(f"{error}; nothing is reported")
        return 1
    print(table(("case", "runtime", "median ms", "least ms", "CPU ms", "least CPU ms", "median", "least", "CPU",
                 "least CPU"), rows))
    print(f"{ROUNDS} rounds in turns. Ratios are to {OURS}: above 1, {OURS} is faster. CPU: all ranks together.")
    return 0


def case(ranks: LocalRanks, shape: Shape, rounds: int) -> list[tuple[str, ...]]:
    """The rows of one size, a pipeline of all ranks.

    Raises:
        WrongGradient: the rivals' gradients differ.
    """
    answers = ranks.run(compare, shape, rounds)
    for note in sorted({note for _, _, notes in answers for note in notes}):
        print(note)
    name = f"pp{ranks.size} {shape.name}"
    require_equal(name, max(difference for _, difference, _ in answers))
    return _rows(name, summed_up([clocked for clocked, _, _ in answers]))


def require_equal(name: str, difference: float) -> None:
    """Raises:
        WrongGradient: `difference`, relative to the gradient's norm, is more than rounding; or it is NaN.
    """
    if not difference <= TOLERANCE:
        raise WrongGradient(f"{name}: gradients differ by {difference:.1e} of their norm")


def compare(world: World, shape: Shape, rounds: int) -> tuple[Clocked, float, list[str]]:
    """On one rank: times of every rival, the largest difference of gradients, and who cannot run."""
    mesh = Mesh(Grid.of(Layout(pp=world.size)), world)
    stage, batches = PlainStage(shape, mesh.pp.index, mesh.pp.size), micro_batches(shape)
    steps = {OURS: our_step(stage, mesh, shape, batches), TORCH: torch_step(stage, mesh, batches)}
    notes = []
    try:
        steps[MEGATRON] = megatron_step(stage, mesh, shape, batches)
    except ImportError as error:
        notes.append(f"megatron-core does not run here: {error}")
    difference = largest_difference(stage, steps)
    fresh = {name: _from_nothing(stage, step) for name, step in steps.items()}
    return in_turns(world, fresh, rounds), difference, notes


def our_step(stage: PlainStage, mesh: Mesh, shape: Shape, batches: Sequence[Tokens]) -> Step:
    """One step of our executor over the micro-batches."""
    kind = ScheduleKind.ONE_F_ONE_B
    chunks = kind.chunks(mesh.pp.size, 1)
    runner = PipelineRunner(lambda x, batch, chunk: stage(x), mesh, chunks, shape.hidden, torch.float32)
    schedule = build(kind, chunks, len(batches))
    return lambda: runner.run(schedule, batches, lambda out, batch: (summed_loss(out, batch.targets), {}))


def torch_step(stage: PlainStage, mesh: Mesh, batches: Sequence[Tokens]) -> Step:
    """One step of torch's own schedule over the micro-batches."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    whole = PipelineStage(stage, mesh.pp.index, mesh.pp.size, mesh.device, group=mesh.pp.process_group)
    schedule = Schedule1F1B(whole, len(batches), loss_fn=summed_loss, scale_grads=False)
    ids = torch.cat([batch.input_ids for batch in batches]) if mesh.is_first_stage else None
    targets = torch.cat([batch.targets for batch in batches]) if mesh.is_last_stage else None

    def step() -> None:
        inputs = () if ids is None else (ids,)
        schedule.step(*inputs, target=targets, losses=None if targets is None else [], return_outputs=False)
    return step


def largest_difference(stage: nn.Module, steps: dict[str, Step]) -> float:
    """Of any rival's gradient to the first one's, relative to its norm."""
    first, *others = [_gradient(stage, step) for step in steps.values()]
    return torch.stack([(other - first).norm() / first.norm() for other in others]).max().item()  # NaN stays NaN


def _gradient(stage: nn.Module, step: Step) -> Tensor:
    _from_nothing(stage, step)()
    return torch.cat([param.grad.double().flatten() for param in stage.parameters()])


def _from_nothing(stage: nn.Module, step: Step) -> Step:
    def run() -> None:
        stage.zero_grad()
        step()
    return run


def _rows(case: str, times: dict[str, Times]) -> list[tuple[str, ...]]:
    ours, rows = times[OURS], []
    for name, time in times.items():
        numbers, to = ((one.median_wall, one.least_wall, one.median_cpu, one.least_cpu) for one in (time, ours))
        rows.append((case if name == OURS else "", name, *(f"{number * 1000:.1f}" for number in numbers),
                     *(ratio(number, of) for number, of in zip(numbers, to))))
    return rows
