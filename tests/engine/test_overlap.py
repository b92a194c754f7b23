"""Reductions start inside the last backward (or W) that touches their bucket, in every schedule, on every stage."""

import pytest

from hybridflow.algorithms.losses import supervised_loss
from hybridflow.algorithms.reduction import LossReduction
from hybridflow.engine.options import TrainOptions
from hybridflow.models.config import Head
from hybridflow.packing import MicroBatching
from hybridflow.parallel.collectives import Pending
from hybridflow.parallel.comm_hook import GradBucket, plain
from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.world import World
from hybridflow.trainer.roles import Reduction, TrainedRole
from tests.engine.models import ragged_batch, tiny_model, train_engine
from tests.ranks import run_ranks


def starts(world: World, kind: ScheduleKind, layout: Layout, vpp: int) -> tuple[list[int], list[int], int]:
    """Buckets in the order of their starts, those that only a REDUCE made start, and how many there are."""
    started: list[int] = []
    forced: list[int] = []

    def noting(bucket: GradBucket) -> Pending:
        started.append(bucket.index)
        return plain(bucket)

    train = TrainOptions(schedule=kind, zero_stage=2, bucket_bytes=9000, hook=noting)
    engine = train_engine(world, layout, tiny_model(qkv_bias=True), Head.LANGUAGE_MODEL, train=train, vpp=vpp)
    start = engine.grads.start

    def forcing(bucket: int) -> None:
        before = len(started)
        start(bucket)
        forced.extend(started[before:])

    engine.grads.start = forcing
    role = TrainedRole(engine, MicroBatching(4), MicroBatching(1), Reduction(LossReduction.TOKEN_MEAN))
    role.update(ragged_batch(world, 10), range(10), lambda out, columns, rows: supervised_loss(out.log_probs, columns))
    return started, forced, len(engine.grads.buckets)


@pytest.mark.parametrize(("kind", "layout", "vpp"), [
    (ScheduleKind.ONE_F_ONE_B, Layout(dp=4), 1), (ScheduleKind.ONE_F_ONE_B, Layout(pp=2, dp=2), 1),
    (ScheduleKind.INTERLEAVED, Layout(pp=2, dp=2), 2), (ScheduleKind.ZB_H1, Layout(pp=2, dp=2), 1),
    (ScheduleKind.ZB_V, Layout(pp=2, cp=2), 2)], ids=str)
def test_no_bucket_waits_for_its_reduce_action(kind: ScheduleKind, layout: Layout, vpp: int) -> None:
    for started, forced, num_buckets in run_ranks(4, starts, kind, layout, vpp):
        assert started == list(range(num_buckets)) and num_buckets >= 6
        assert forced == []
