"""The bubble's parts on two stages: what runs, what is counted. Never how long it took."""

import pytest

from hybridflow.bench.bubble import least_vpp, sleep_through
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.schedules.training import build
from tests.ranks import run_ranks


@pytest.mark.parametrize("kind", ScheduleKind)
def test_every_action_has_a_span_and_every_computation_sleeps(kind: ScheduleKind):
    schedule = build(kind, kind.chunks(2, least_vpp(kind)), 3)
    for stage, (asleep, spans) in enumerate(run_ranks(2, sleep_through, schedule, 0.001)):
        assert tuple(span.action for span in spans) == schedule.stages[stage]
        assert asleep >= 0.001 * 3 * 3 * schedule.chunks.vpp  # F, B and W of three micro-batches
