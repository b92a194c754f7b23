"""Context ranks beside everything that issues collectives of its own: schedules, buckets reduced in backward, sequence
parallelism, recomputation, ZeRO. fp64, against one process.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.losses import supervised_loss
from hybridflow.algorithms.reduction import LossReduction
from hybridflow.engine.native import Output, TrainEngine
from hybridflow.engine.options import EngineOptions, TrainOptions
from hybridflow.micro_batch import TokenColumns
from hybridflow.models.config import Head
from hybridflow.models.recompute import Recompute
from hybridflow.packing import MicroBatching
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.optimizer import LrSchedule
from hybridflow.parallel.optimizer_state import AdamWSettings
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.world import World
from hybridflow.target_rows import TargetRows
from hybridflow.trainer.roles import Reduction, TrainedRole
from tests.engine.models import assemble, canonical_grads, ragged_batch, tiny_model
from tests.ranks import run_ranks

ROWS = 9
SMALL = 2048  # bytes of a bucket: a matrix or two


@dataclass(frozen=True)
class Case:
    layout: Layout
    train: TrainOptions = TrainOptions(ScheduleKind.GPIPE)
    vpp: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = Recompute.NONE
    rows_at_once: int = 2


CASES = [
    Case(Layout(cp=4), TrainOptions(bucket_bytes=SMALL), recompute=Recompute.SELECTIVE, rows_at_once=1),
    Case(Layout(tp=2, cp=2), TrainOptions(bucket_bytes=SMALL), sequence_parallel=True, recompute=Recompute.SELECTIVE),
    Case(Layout(dp=2, cp=2), TrainOptions(bucket_bytes=SMALL), recompute=Recompute.FULL, rows_at_once=3),
    Case(Layout(pp=2, cp=2), TrainOptions(ScheduleKind.INTERLEAVED, bucket_bytes=SMALL), 2),
    Case(Layout(pp=2, cp=2), TrainOptions(ScheduleKind.ZB_H1, bucket_bytes=SMALL), recompute=Recompute.FULL),
    Case(Layout(pp=2, cp=2), TrainOptions(ScheduleKind.ZB_V, bucket_bytes=SMALL), 2, recompute=Recompute.SELECTIVE),
]
SHARDED = [
    Case(Layout(dp=2, cp=2), TrainOptions(zero_stage=2, bucket_bytes=SMALL)),
    Case(Layout(cp=4), TrainOptions(zero_stage=1)),
    Case(Layout(pp=2, cp=2), TrainOptions(ScheduleKind.ZB_V, zero_stage=2, bucket_bytes=SMALL), 2),
]
LARGE = [
    Case(Layout(tp=2, pp=2, cp=2), TrainOptions(ScheduleKind.ZB_V, bucket_bytes=SMALL), 2, sequence_parallel=True,
         recompute=Recompute.SELECTIVE),
    Case(Layout(pp=2, cp=4), TrainOptions(ScheduleKind.INTERLEAVED, bucket_bytes=SMALL), 2, recompute=Recompute.FULL),
]


@dataclass(frozen=True)
class Seen:
    """Log-probs before the step of the rows at home here; the step's loss sums, gradient norm and gradients (none where
    they are sharded); log-probs after it."""

    before: Tensor
    sums: dict[str, float]
    norm: float
    grads: dict
    after: Tensor


def sft_loss(output: Output, columns: TokenColumns, rows: TargetRows) -> tuple[Tensor, dict[str, Tensor]]:
    return supervised_loss(output.log_probs, columns)


def engine_of(world: World, case: Case) -> TrainEngine:
    options = EngineOptions(torch.float64, case.sequence_parallel, recompute=case.recompute,
                            chunks=case.train.schedule.chunks(case.layout.pp, case.vpp))
    engine = TrainEngine(tiny_model(), Mesh(Grid.of(case.layout), world), Head.LANGUAGE_MODEL, options,
                         train=case.train, adamw=AdamWSettings(clip_grad_norm=None), lr=LrSchedule(1e-3))
    engine.draw(seed=7)
    return engine


def step(world: World, cases: list[Case]) -> list[Seen]:
    found = []
    for case in cases:
        engine = engine_of(world, case)
        role = TrainedRole(engine, MicroBatching(3), MicroBatching(case.rows_at_once),
                           Reduction(LossReduction.TOKEN_MEAN))
        batch = ragged_batch(world, ROWS)
        before = role.answer_tokens(batch)
        update = role.update(batch, range(ROWS), sft_loss)
        grads = canonical_grads(engine) if case.train.zero_stage == 0 else {}
        found.append(Seen(before, update.sums, update.step.grad_norm, grads, role.answer_tokens(batch)))
    return found


@pytest.mark.parametrize("cases", [CASES, SHARDED, LARGE], ids=["4 ranks", "sharded", "8 ranks"])
def test_a_step_is_that_of_one_process(cases: list[Case]):
    world = World.single(torch.device("cpu"))
    like = engine_of(world, Case(Layout()))
    [alone] = step(world, [Case(Layout())])
    expected = assemble(like, [alone.grads])
    by_rank = run_ranks(cases[0].layout.size, step, cases)
    for number, case in enumerate(cases):
        seen = [rank[number] for rank in by_rank]
        torch.testing.assert_close(seen[0].before, alone.before, rtol=0, atol=1e-12, msg=str(case))
        torch.testing.assert_close(seen[0].after, alone.after, rtol=0, atol=1e-8, msg=str(case))
        for one in seen:
            assert one.norm == pytest.approx(alone.norm, rel=1e-10), case
            assert one.sums == pytest.approx(alone.sums, rel=1e-10), case
        if case.train.zero_stage == 0:
            for name, grad in assemble(like, [one.grads for one in seen]).items():
                largest = (grad - expected[name]).abs().max().item()
                assert largest <= 1e-10, (case, name, largest)
