"""REDUCE, STEP and RESHARD: each bucket reduced right behind its last gradient, the step behind everything."""

import pytest

from hybridflow.parallel.schedules.actions import Action, Kind
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.schedules.updates import last_gradients, with_updates
from tests.parallel.schedules.grids import chunks_of


@pytest.mark.parametrize("kind", ScheduleKind)
def test_a_bucket_is_reduced_right_behind_its_last_gradient(kind: ScheduleKind) -> None:
    chunks = chunks_of(kind, 3)[0]
    compute = kind.compute(chunks, 5)
    buckets = [[*chunks.of_stage(stage), chunks.of_stage(stage)[0]] for stage in range(3)]
    schedule = with_updates(compute, buckets, reshards=[0, 2, 1])
    for stage, actions in enumerate(schedule.stages):
        last = last_gradients(compute, stage)
        assert {action.kind for action in last.values()} == {Kind.W if compute.splits_backward else Kind.B}
        for bucket, chunk in enumerate(buckets[stage]):
            place = actions.index(Action(Kind.REDUCE, bucket))
            before = [action for action in actions[:place] if action.kind is not Kind.REDUCE]
            assert before[-1] == last[chunk]
        step = actions.index(Action(Kind.STEP))
        assert actions[step + 1 :] == tuple(Action(Kind.RESHARD, i) for i in range([0, 2, 1][stage]))
        assert [a for a in actions[:step] if a.kind is not Kind.REDUCE] == list(compute.stages[stage])


def test_buckets_that_do_not_fit() -> None:
    compute = ScheduleKind.GPIPE.compute(ScheduleKind.GPIPE.chunks(2, 1), 2)
    with pytest.raises(ValueError, match="bucket 1 of stage 0 is of chunk 1; the stage has"):
        with_updates(compute, [[0, 1], [1]])
    with pytest.raises(ValueError, match="buckets of 1 and reshards of 2 stages were given for 2 stages"):
        with_updates(compute, [[0]])
    with pytest.raises(ValueError, match="buckets of 2 and reshards of 1 stages were given for 2 stages"):
        with_updates(compute, [[0], [1]], [1])
