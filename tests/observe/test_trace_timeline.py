"""An optimizer step read back from a trace, against the simulation that the trace was made of."""

import json

import pytest

from hybridflow.observe.trace import TraceCategory, TraceEvent
from hybridflow.observe.trace_file import write_trace
from hybridflow.observe.trace_timeline import estimated_costs, read_update
from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.schedules.actions import COMPUTE, Kind
from hybridflow.parallel.schedules.builders import ScheduleKind, forward_only
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.schedules.messages import with_messages
from hybridflow.parallel.schedules.simulate import Costs, simulate
from hybridflow.parallel.schedules.training import build

COSTS = Costs(0.010, 0.006, 0.006, step=0.020, reshard=0.003)


def traced(timeline, schedule, start_s):
    """The events of each stage as the runner would record them: a span begins when the one before it ends."""
    lanes = []
    for actions, spans in zip(schedule.stages, timeline.stages, strict=True):
        ends, now, lane = {span.action: span.end for span in spans}, 0.0, []
        for action in actions:
            own = action.kind in (*COMPUTE, Kind.STEP, Kind.RESHARD)
            end = ends[action] if own else now + 1e-8  # messages and reduces only start there
            lane.append(TraceEvent(str(action), TraceCategory.PIPELINE, round((start_s + now) * 1e9),
                                   round((end - now) * 1e9)))
            now = end
        lanes.append(lane)
    return lanes


def whole_trace(path, schedule, numbers=(4, 4, 2), pp=2, beside=lambda rank: f"cp 0, dp {rank}"):
    """Two replicas; a scoring run, then an update of each of these numbers of micro-batches, the second one slower.

    `beside` names the two ranks of a stage.
    """
    events = {rank: [] for rank in range(2 * pp)}
    scored = with_messages(forward_only(schedule(1).chunks, 4))
    labels = {rank: f"tp 0, {beside(rank % 2)}, pp {rank // 2}" for rank in events}
    runs = [(scored, Costs(0.5), 0.0)]
    runs += [(schedule(m), COSTS if i == 0 else SLOWER, 10.0 * (i + 1)) for i, m in enumerate(numbers)]
    for made, costs, start in runs:
        for stage, lane in enumerate(traced(simulate(made, costs), made, start)):
            for rank in (2 * stage, 2 * stage + 1):
                events[rank] += lane if rank == 2 * stage else [event._replace(duration_ns=1) for event in lane]
    phase = TraceEvent("update_actor", TraceCategory.PHASES, 9_000_000_000, 90_000_000_000)
    write_trace({rank: [phase, *lane] for rank, lane in events.items()}, path, labels)


SLOWER = Costs(0.020, 0.012, 0.012, step=0.020, reshard=0.003)


def schedule_of(kind=ScheduleKind.ONE_F_ONE_B, vpp=1, reshards=(1, 2)):
    return lambda m: build(kind, kind.chunks(2, vpp), m, reshards=reshards)


@pytest.mark.parametrize(("kind", "vpp"), [(ScheduleKind.ONE_F_ONE_B, 1), (ScheduleKind.INTERLEAVED, 2)])
def test_a_step_is_read_as_it_was_simulated_without_the_waits_within_spans(tmp_path, kind, vpp):
    schedule, path = schedule_of(kind, vpp), tmp_path / "trace.json"
    whole_trace(path, schedule)
    measured = read_update(path, kind.chunks(2, vpp))
    expected = simulate(schedule(4), SLOWER)
    assert measured.schedule == schedule(4)
    for stage in range(2):
        own = [span for span in expected.stages[stage] if span.action.kind in (*COMPUTE, Kind.STEP, Kind.RESHARD)]
        got = [span for span in measured.timeline.stages[stage] if span.action in {span.action for span in own}]
        assert [span.action for span in got] == [span.action for span in own]
        assert [span.start - measured.timeline.start for span in got] == pytest.approx([s.start for s in own], abs=1e-6)
        assert [span.duration for span in got] == pytest.approx([span.duration for span in own], abs=1e-6)
    assert measured.timeline.bubble_fraction == pytest.approx(expected.bubble_fraction, abs=1e-4)
    assert (measured.place, measured.num_updates) == (1, 3)  # the last of the fullest
    assert measured.layout == Layout(dp=2, pp=2)


def test_reduces_are_left_out_where_gradients_are_on_one_rank(tmp_path):
    kind, path = ScheduleKind.ONE_F_ONE_B, tmp_path / "trace.json"

    def kinds(beside):
        whole_trace(path, lambda m: build(kind, kind.chunks(2, 1), m, buckets=((0,), (1, 1))), beside=beside)
        tp = 2 if "tp" in beside(1) else 1
        measured = read_update(path, kind.chunks(2, 1), tp, 2 if "cp 1" in beside(1) else 1)
        assert [span.action for span in measured.timeline.stages[1]] == list(measured.schedule.stages[1])
        return [action.kind for action in measured.schedule.stages[1]]

    assert kinds(lambda rank: f"cp 0, dp {rank}").count(Kind.REDUCE) == 2
    assert kinds(lambda rank: f"cp {rank}, dp 0").count(Kind.REDUCE) == 2
    alone = kinds(lambda rank: f"cp 0, dp 0, tp {rank}")
    assert Kind.REDUCE not in alone and alone[-1] is Kind.STEP


def test_costs_are_the_medians_of_what_was_measured(tmp_path):
    schedule, path = schedule_of(ScheduleKind.INTERLEAVED, 2), tmp_path / "trace.json"
    whole_trace(path, schedule)
    measured = read_update(path, ScheduleKind.INTERLEAVED.chunks(2, 2))
    costs = estimated_costs(measured)
    assert costs.forward == pytest.approx((0.020,) * 4, abs=1e-6)
    assert costs.backward == costs.weight == pytest.approx((0.012,) * 4, abs=1e-6)  # half of B each
    assert costs.step == pytest.approx(0.020, abs=1e-6) and costs.reshard == pytest.approx(0.003, abs=1e-6)
    again = simulate(measured.schedule, costs)
    assert again.bubble_fraction == pytest.approx(measured.timeline.bubble_fraction, abs=1e-4)


def test_what_is_no_trace_of_this_config_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    with pytest.raises(ValueError, match=r"cannot be read .*logging.trace_step"):
        read_update(path, Chunks(2))
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no trace that a run wrote"):
        read_update(path, Chunks(2))
    whole_trace(path, schedule_of())
    with pytest.raises(ValueError, match="of a run with pp 2, and train.layout has pp 3: give the config of that run"):
        read_update(path, Chunks(3))
    with pytest.raises(ValueError, match="a run with tp 1, cp 1, dp 2, and train.layout has tp 2, cp 3, dp 4: give"):
        read_update(path, Chunks(2), tp=2, cp=3, dp=4)
    with pytest.raises(ValueError, match=r"stage 0 did not run the chunks \(0, 2\) of this config"):
        read_update(path, Chunks(2, 2))


def test_a_lane_that_does_not_say_where_its_rank_stands_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    whole_trace(path, schedule_of(), beside=lambda rank: f"dp {rank}")
    with pytest.raises(ValueError, match=r"'rank 0 \(tp 0, dp 0, pp 0\)' does not say where .* on tp, cp, dp, pp"):
        read_update(path, Chunks(2))


def test_a_trace_without_an_update_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    whole_trace(path, schedule_of(), numbers=())
    with pytest.raises(ValueError, match="no whole optimizer step of the actor"):
        read_update(path, Chunks(2))


def test_actions_of_another_age_are_named(tmp_path):
    path = tmp_path / "trace.json"
    whole_trace(path, schedule_of())
    trace = json.loads(path.read_text())
    for row in trace["traceEvents"]:
        row["name"] = row["name"].partition(".")[0]
    path.write_text(json.dumps(trace))
    with pytest.raises(ValueError, match="'F0' on stage 0 is not an action"):
        read_update(path, Chunks(2))
