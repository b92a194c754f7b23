"""`bench memory`: what a training step holds at its peak, and what it reduces, by the number of micro-batches.

Runs whole steps of the training engine on two stages of two replicas. Counted is everything that a step makes beyond
its inputs, weights, gradients and optimizer state: activations, messages, and whatever is on its way. GPipe, which
must hold every micro-batch, stands beside for contrast.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from hybridflow.algorithms.losses import supervised_loss
from hybridflow.bench.live_bytes import LiveBytes
from hybridflow.engine.native import TrainEngine
from hybridflow.engine.options import EngineOptions, TrainOptions
from hybridflow.local_ranks import LocalRanks
from hybridflow.micro_batch import MicroBatch, Sample, TokenColumns
from hybridflow.models.config import Family, Head, ModelConfig
from hybridflow.observe.table import mib, table
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.optimizer import LrSchedule
from hybridflow.parallel.optimizer_state import AdamWSettings
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.world import World

LAYOUT = Layout(pp=2, dp=2)
MICRO_BATCHES = (4, 8, 16, 32, 64)
MODEL = ModelConfig(Family.LLAMA, vocab_size=128, hidden_size=64, intermediate_size=128, num_layers=4, num_heads=4,
                    num_kv_heads=2, head_dim=16)
TOKENS = 64  # of one micro-batch
MOST_GROWTH = 0.02  # from the fewest to the most micro-batches


@dataclass(frozen=True)
class Held:
    """Of one rank and step, in bytes."""

    peak: int
    reduced: int


def main() -> int:
    """Measure and print. Returns 1 where memory or reduced bytes grow with the micro-batches."""
    held: dict[tuple[ScheduleKind, int], Held] = {}
    with LocalRanks(LAYOUT.size, ("hybridflow.bench.memory",)) as ranks:
        for kind in ScheduleKind:
            for m, of_ranks in zip(MICRO_BATCHES, zip(*ranks.run(measure, kind, MICRO_BATCHES), strict=True)):
                held[kind, m] = Held(max(one.peak for one in of_ranks), max(one.reduced for one in of_ranks))
    rows = [(str(m), *(mib(held[kind, m].peak) for kind in ScheduleKind),
             mib(held[ScheduleKind.ONE_F_ONE_B, m].reduced)) for m in MICRO_BATCHES]
    print(table(("micro-batches", *(f"{kind.value} MiB" for kind in ScheduleKind), "1f1b reduces MiB"), rows))
    print(f"{LAYOUT}, {TOKENS} tokens a micro-batch; of the rank with the most. Of weights, gradients and moments only "
          "what a step makes anew is counted.")
    faults = growing(held)
    print("\n".join(faults) or "Neither grows with the number of micro-batches, but GPipe's memory.")
    return 1 if faults else 0


def growing(held: dict[tuple[ScheduleKind, int], Held]) -> list[str]:
    """What depends on the number of micro-batches and must not."""
    faults = []
    for kind in {kind for kind, _ in held}:
        of_kind = [one for (other, _), one in held.items() if other is kind]
        peaks = [one.peak for one in of_kind]
        if kind is not ScheduleKind.GPIPE and max(peaks) > (1 + MOST_GROWTH) * min(peaks):
            faults.append(f"{kind.value}: the peak grows from {mib(min(peaks))} to {mib(max(peaks))} MiB")
        if len({one.reduced for one in of_kind}) > 1:
            faults.append(f"{kind.value}: reduced bytes depend on the number of micro-batches")
    return sorted(faults)


def measure(world: World, kind: ScheduleKind, micro_batches: tuple[int, ...]) -> list[Held]:
    """One step for each number of micro-batches, on one rank. Collective."""
    mesh = Mesh(Grid.of(LAYOUT), world)
    vpp = 2 if kind in (ScheduleKind.INTERLEAVED, ScheduleKind.ZB_V) else 1
    engine = TrainEngine(MODEL, mesh, Head.LANGUAGE_MODEL, EngineOptions(chunks=kind.chunks(LAYOUT.pp, vpp)),
                         train=TrainOptions(kind, zero_stage=1), adamw=AdamWSettings(), lr=LrSchedule(1e-3))
    engine.draw(seed=0)
    _step(engine, micro_batches[0])  # states that are made at their first use
    return [_step(engine, m) for m in micro_batches]


def _step(engine: TrainEngine, m: int) -> Held:
    batches, before = equal_rows(m, engine.mesh.device), engine.grads.reduced_bytes
    with LiveBytes() as live:
        engine.train(batches, lambda out, columns, rows: supervised_loss(out.log_probs, columns))
    return Held(live.peak, engine.grads.reduced_bytes - before)


def equal_rows(m: int, device: torch.device) -> list[MicroBatch]:
    """One row of `TOKENS` tokens in each micro-batch."""
    draw = random.Random(0)
    batches = []
    for _ in range(m):
        ids = tuple(draw.randrange(MODEL.vocab_size) for _ in range(TOKENS))
        columns = TokenColumns(weight=torch.full((TOKENS - 1,), 1 / (m * TOKENS), device=device))
        batches.append(MicroBatch.pack([Sample(ids[:1], ids[1:])], columns, device=device))
    return batches
