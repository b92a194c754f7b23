"""`bench bubble`: the share of time that stages stand idle, measured with a layer that sleeps, beside the simulator's.

Everything but the layer is real: the executor, its messages, and the split of the backward, whose W sleeps when the
executor runs the weight gradients. Sleeping needs no core, so a few cores carry any number of stages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow.local_ranks import LocalRanks
from hybridflow.observe.table import table
from hybridflow.parallel.linear import linear
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.pipeline import PipelineRunner
from hybridflow.parallel.schedules.actions import Schedule
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.schedules.simulate import Costs, simulate
from hybridflow.parallel.schedules.timeline import Span, Timeline
from hybridflow.parallel.schedules.training import build
from hybridflow.parallel.weight_grads import WeightGrads
from hybridflow.parallel.world import World

PP = 4
MICRO_BATCHES = (4, 7, 8, 16)
RUNS = 5  # at most, until one is near the simulator: what else the machine does can only add to a bubble
NEAR_POINTS = 2.0
SECONDS = 0.1  # of each of F, B and W of one stage; a chunk has its share
MOST_POINTS = 3.0  # between measured and simulated bubble, in percent of the time
ZERO_BUBBLE_SHARE = 1 / 3  # of 1F1B's bubble
WIDTH = 8


@dataclass(frozen=True)
class Ids:
    """A micro-batch of nothing: `[WIDTH]` ids."""

    input_ids: Tensor = field(default_factory=lambda: torch.zeros(WIDTH, dtype=torch.int64))


def main() -> int:
    """Measure and print. Returns 1 where a bubble is not the simulator's, or zero-bubble's not small."""
    rows, missed = [], []
    with LocalRanks(PP, ("hybridflow.bench.bubble",)) as ranks:
        for m in MICRO_BATCHES:
            bubbles = {kind: bubble(ranks, kind, m, SECONDS) for kind in ScheduleKind}
            whole = bubbles[ScheduleKind.ONE_F_ONE_B][1]
            for kind, (simulated, measured) in bubbles.items():
                points = 100 * (measured - simulated)
                rows.append((kind.value, str(m), f"{100 * measured:.1f}", f"{100 * simulated:.1f}", f"{points:+.1f}",
                             f"{measured / whole:.2f}"))
                if abs(points) > MOST_POINTS:
                    missed.append(f"{kind.value} at m {m}: {points:+.1f} points from the simulator")
            if bubbles[ScheduleKind.ZB_V][1] >= ZERO_BUBBLE_SHARE * whole:
                missed.append(f"zb-v at m {m}: not below a third of 1F1B's bubble")
    print(table(("schedule", "m", "measured %", "simulated %", "points", "of 1F1B's"), rows))
    print(f"pp {PP}; F, B and W sleep {1000 * SECONDS:.0f} ms each on every stage; all of it runs in the executor.")
    print("\n".join(missed) or f"Every difference is within {MOST_POINTS:.0f} points.")
    return 1 if missed else 0


def bubble(ranks: LocalRanks, kind: ScheduleKind, m: int, seconds: float) -> tuple[float, float]:
    """Bubble fractions of one schedule: simulated, measured.

    An F or B of the executor begins with the wait for its message, so what is busy is what the layer has slept; the
    time from the first start to the last end is the executor's.
    """
    schedule = build(kind, kind.chunks(ranks.size, least_vpp(kind)), m)
    part = seconds / schedule.chunks.vpp
    simulated = simulate(schedule, Costs(part, part, part)).bubble_fraction
    ranks.run(sleep_through, schedule, 0.0)  # connects the links
    least = 1.0
    for _ in range(RUNS):
        least = min(least, measured_bubble(ranks, schedule, part))
        if 100 * (least - simulated) <= NEAR_POINTS:
            break
    return simulated, least


def measured_bubble(ranks: LocalRanks, schedule: Schedule, seconds: float) -> float:
    """The bubble fraction of one run."""
    asleep, spans = zip(*ranks.run(sleep_through, schedule, seconds), strict=True)
    return 1 - sum(asleep) / (ranks.size * Timeline(spans).makespan)


def least_vpp(kind: ScheduleKind) -> int:
    """Chunks on a stage: as few as the schedule can have with several stages."""
    return 2 if kind in (ScheduleKind.INTERLEAVED, ScheduleKind.ZB_V) else 1


def sleep_through(world: World, schedule: Schedule, seconds: float) -> tuple[float, tuple[Span, ...]]:
    """Run a schedule over chunks whose F, B and W sleep `seconds`; how long they slept, and the spans of all actions.
    """
    mesh, weight_grads, clock = Mesh(Grid.of(Layout(pp=world.size)), world), WeightGrads(), Sleeper(seconds)
    stage = SleepyStage(schedule.chunks, mesh.pp.index, clock, weight_grads)
    runner = PipelineRunner(stage, mesh, schedule.chunks, WIDTH, torch.float32, weight_grads=weight_grads)
    lane = Recorder({str(action): action for action in schedule.stages[mesh.pp.index]})
    batches = [Ids() for _ in range(schedule.num_micro_batches)]
    world.barrier()
    runner.run(schedule, batches, lambda out, batch: (out.sum(), {}), trace=lane)
    return clock.asleep, tuple(lane.spans)


class Sleeper:
    """Sleeps, and adds up how long it really was."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.asleep = seconds, 0.0

    def __call__(self) -> None:
        start = time.perf_counter()
        time.sleep(self.seconds)
        self.asleep += time.perf_counter() - start


class SleepyStage(nn.Module):
    """The chunks of one stage, each a linear layer whose F, B and W also sleep."""

    def __init__(self, chunks: Chunks, stage: int, sleep: Sleeper, weight_grads: WeightGrads) -> None:
        super().__init__()
        self.sleep, self.weight_grads = sleep, weight_grads
        self.weights = nn.ParameterDict({str(chunk): torch.eye(WIDTH) for chunk in chunks.of_stage(stage)})
        main_grad = torch.zeros(WIDTH, WIDTH)
        for weight in self.weights.values():
            weight_grads.register(weight, lambda: main_grad, sleep)

    def forward(self, x: Tensor, batch: Ids, chunk: int) -> Tensor:
        hidden = torch.zeros(WIDTH, WIDTH) if chunk == 0 else x
        return _Sleep.apply(linear(hidden, self.weights[str(chunk)], None, self.weight_grads), self.sleep)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sleep: Sleeper) -> Tensor:
        ctx.sleep = sleep
        sleep()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.sleep()
        return grad, None


class Recorder:
    """A lane that keeps the spans of the actions of a schedule."""

    def __init__(self, actions: dict[str, Any]) -> None:
        self.actions, self.spans = actions, []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the time spent inside the `with` block. All processes of a host share this clock."""
        start = time.perf_counter()
        yield
        if name in self.actions:
            self.spans.append(Span(self.actions[name], start, time.perf_counter()))
