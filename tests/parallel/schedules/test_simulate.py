"""The simulator against closed forms and against times that were worked out by hand."""

import pytest

from hybridflow.parallel.schedules.actions import Action, Kind, Schedule
from hybridflow.parallel.schedules.builders import ScheduleKind, forward_only
from hybridflow.parallel.schedules.check import peak_in_flight
from hybridflow.parallel.schedules.chunks import ChunkOrder, Chunks
from hybridflow.parallel.schedules.messages import with_messages
from hybridflow.parallel.schedules.simulate import Costs, simulate
from hybridflow.parallel.schedules.timeline import Span, Timeline
from hybridflow.parallel.schedules.training import build

KINDS = [(ScheduleKind.GPIPE, 1), (ScheduleKind.ONE_F_ONE_B, 1), (ScheduleKind.INTERLEAVED, 2), (ScheduleKind.ZB_H1, 1),
         (ScheduleKind.ZB_V, 2)]


def schedule(kind, pp, m, vpp=1, **more):
    return build(kind, kind.chunks(pp, vpp), m, **more)


def handmade(text, *chunks):
    return Schedule.from_text(text, Chunks(*chunks))


def times(timeline, stage):
    return {str(span.action): (span.start, span.end) for span in timeline.stages[stage]}


@pytest.mark.parametrize("kind", [ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B])
@pytest.mark.parametrize(("pp", "m"), [(1, 3), (2, 1), (4, 3), (4, 4), (4, 7), (8, 64)])
def test_the_bubble_of_gpipe_and_1f1b(kind, pp, m):
    assert simulate(schedule(kind, pp, m), Costs()).bubble_fraction == pytest.approx((pp - 1) / (m + pp - 1))


@pytest.mark.parametrize(("pp", "vpp", "m"), [(2, 2, 2), (4, 2, 4), (4, 2, 16), (4, 3, 8), (8, 4, 16)])
def test_the_bubble_of_interleaving(pp, vpp, m):
    got = simulate(schedule(ScheduleKind.INTERLEAVED, pp, m, vpp), Costs()).bubble_fraction
    assert got == pytest.approx((pp - 1) / (vpp * m + pp - 1))


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (8, 16), (8, 64)])
def test_the_bubble_of_zb_h1(pp, m):
    """(pp - 1)(F + B - W) of idle time on each stage, arXiv 2401.10241 table 2."""
    got = simulate(schedule(ScheduleKind.ZB_H1, pp, m), Costs()).bubble_fraction
    assert got == pytest.approx((pp - 1) / (3 * m + pp - 1))


@pytest.mark.parametrize(("pp", "m"), [(1, 1), (3, 1), (4, 9)])
def test_forwards_alone_fill_the_pipeline_once(pp, m):
    timeline = simulate(with_messages(forward_only(Chunks(pp), m)), Costs(forward=2.0))
    assert timeline.makespan == pytest.approx(2.0 * (m + pp - 1))
    assert timeline.bubble_fraction == pytest.approx((pp - 1) / (m + pp - 1))


@pytest.mark.parametrize(("kind", "vpp"), KINDS)
@pytest.mark.parametrize("m", [1, 3, 8])
def test_every_kind_computes_everything_once_and_holds_what_the_checker_counts(kind, vpp, m):
    made = schedule(kind, 4, m, vpp)
    timeline = simulate(made, Costs(1.0, 1.0, 1.0))
    assert timeline.busy == pytest.approx([3.0 * vpp * m] * 4)
    assert timeline.peak_activations() == peak_in_flight(made)
    assert timeline.idle == pytest.approx([timeline.makespan - 3.0 * vpp * m] * 4)


def test_a_message_costs_alpha_and_beta_and_is_waited_for():
    text = """
        stage 0: F0.0 SEND_F0.0 RECV_B0.0 B0.0
        stage 1: RECV_F0.1 F0.1 B0.1 SEND_B0.1"""
    costs = Costs(forward=1.0, backward=2.0, weight=3.0, alpha=0.25, beta=0.001, message_bytes=250.0)
    timeline = simulate(handmade(text, 2), costs)
    assert times(timeline, 0) == {"F0.0": (0, 1), "SEND_F0.0": (1, 1.5), "RECV_B0.0": (1, 8), "B0.0": (8, 13)}
    assert times(timeline, 1) == {"RECV_F0.1": (0, 1.5), "F0.1": (1.5, 2.5), "B0.1": (2.5, 7.5), "SEND_B0.1": (7.5, 8)}
    assert (timeline.makespan, timeline.busy) == (13, (6, 6))
    assert timeline.bubble_fraction == pytest.approx(1 - 12 / 26)


def test_a_link_carries_one_message_at_a_time_in_order_while_the_stage_goes_on():
    text = """
        stage 0: F0.0 SEND_F0.0 F1.0 SEND_F1.0
        stage 1: RECV_F0.1 RECV_F1.1 F0.1 F1.1"""
    timeline = simulate(handmade(text, 2), Costs(forward=1.0, alpha=3.0))
    assert times(timeline, 0) == {"F0.0": (0, 1), "SEND_F0.0": (1, 4), "F1.0": (1, 2), "SEND_F1.0": (4, 7)}
    assert times(timeline, 1) == {"RECV_F0.1": (0, 4), "RECV_F1.1": (0, 7), "F0.1": (4, 5), "F1.1": (7, 8)}


def test_the_directions_of_a_link_do_not_wait_for_each_other():
    text = """
        stage 0: F0.0 SEND_F0.0 RECV_F0.2 F0.2 SEND_F0.2
        stage 1: RECV_F0.1 F0.1 SEND_F0.1 RECV_F0.3 F0.3"""
    timeline = simulate(handmade(text, 2, 2), Costs(forward=1.0, alpha=1.0))
    assert times(timeline, 1)["F0.3"] == (6, 7)


def test_chunks_that_meet_on_a_stage_need_no_message():
    text = """
        stage 0: F0.0 SEND_F0.0 RECV_F0.3 F0.3 B0.3 SEND_B0.3 RECV_B0.0 B0.0
        stage 1: RECV_F0.1 F0.1 F0.2 SEND_F0.2 RECV_B0.2 B0.2 B0.1 SEND_B0.1"""
    timeline = simulate(handmade(text, 2, 2, ChunkOrder.V), Costs(1.0, 0.5, 0.5, alpha=0.5))
    assert times(timeline, 1)["F0.2"] == (2.5, 3.5)
    assert times(timeline, 0)["F0.3"] == (4.0, 5.0)
    assert timeline.makespan == 10


def test_a_backward_without_its_w_does_both():
    split = handmade("stage 0: F0.0 B0.0 F1.0 B1.0 W0.0", 1)
    timeline = simulate(split, Costs(forward=1.0, backward=2.0, weight=4.0))
    assert times(timeline, 0) == {"F0.0": (0, 1), "B0.0": (1, 3), "F1.0": (3, 4), "B1.0": (4, 10), "W0.0": (10, 14)}
    assert timeline.activations(0) == [(0, 1), (3, 2), (10, 1), (14, 0)]


def test_chunks_have_costs_and_activations_of_their_own():
    made = handmade("stage 0: F0.0 F0.1 B0.1 B0.0", 1, 2)
    timeline = simulate(made, Costs(forward=(1.0, 2.0), backward=(3.0, 4.0), weight=(0.5, 0.0)))
    assert times(timeline, 0) == {"F0.0": (0, 1), "F0.1": (1, 3), "B0.1": (3, 7), "B0.0": (7, 10.5)}
    assert timeline.peak_activations((10.0, 70.0)) == (80.0,)


def test_reduces_begin_within_the_backward_and_the_step_waits_for_all_stages():
    text = """
        stage 0: F0.0 SEND_F0.0 RECV_B0.0 B0.0 REDUCE0 STEP RESHARD0
        stage 1: RECV_F0.1 F0.1 B0.1 SEND_B0.1 REDUCE0 REDUCE1 STEP"""
    costs = Costs(1.0, 2.0, 2.0, reduce=(1.5, 1.0), step=5.0, reshard=2.0)
    timeline = simulate(handmade(text, 2), costs)
    assert times(timeline, 1) == {"RECV_F0.1": (0, 1), "F0.1": (1, 2), "B0.1": (2, 6), "REDUCE0": (4, 5.5),
                                  "SEND_B0.1": (6, 6), "REDUCE1": (6, 7), "STEP": (11.5, 16.5)}
    assert times(timeline, 0)["REDUCE0"] == (10, 11.5)
    assert times(timeline, 0)["STEP"] == (11.5, 16.5) and times(timeline, 0)["RESHARD0"] == (16.5, 18.5)
    assert (timeline.makespan, timeline.duration) == (10, 18.5)
    assert timeline.bubble_fraction == pytest.approx(0.5)  # of the computation: the step is no bubble


def test_reduces_of_a_stage_follow_each_other_or_stop_it():
    made = handmade("stage 0: F0.0 F0.1 B0.1 REDUCE0 B0.0 REDUCE1 STEP", 1, 2)
    beside = simulate(made, Costs(1.0, 1.0, 1.0, reduce=5.0))
    assert (times(beside, 0)["REDUCE0"], times(beside, 0)["REDUCE1"]) == ((4, 9), (9, 14))
    assert (beside.makespan, beside.duration) == (6, 14)
    between = simulate(made, Costs(1.0, 1.0, 1.0, reduce=5.0, overlap_reduce=False))
    assert times(between, 0)["B0.0"] == (9, 11) and between.duration == 16


def test_what_can_never_run_is_named():
    with pytest.raises(ValueError, match=r"never ends: waiting at F0.1 on stage 1"):
        simulate(handmade("stage 0: F0.0\nstage 1: RECV_F0.1 F0.1", 2), Costs())
    with pytest.raises(ValueError, match=r"stage 1 runs F0.1 without RECV_F0.1 before it"):
        simulate(handmade("stage 0: F0.0 SEND_F0.0\nstage 1: F0.1", 2), Costs())


def test_zero_bubble_schedules_idle_less_than_1f1b():
    def bubble(kind, vpp=1):
        return simulate(schedule(kind, 4, 8, vpp), Costs(1 / vpp, 1 / vpp, 1 / vpp)).bubble_fraction

    assert bubble(ScheduleKind.ZB_V, 2) < bubble(ScheduleKind.ZB_H1) < bubble(ScheduleKind.ONE_F_ONE_B)
    assert bubble(ScheduleKind.ZB_V, 2) < bubble(ScheduleKind.ONE_F_ONE_B) / 3


def test_a_timeline_that_starts_late_has_the_same_bubble():
    span = Span(Action(Kind.F, 0, 0), 100.0, 101.0)
    late = Timeline(((span,), (Span(Action(Kind.F, 0, 1), 101.0, 103.0),)))
    assert (late.start, late.makespan, late.idle) == (100.0, 3.0, (2.0, 1.0))
    assert late.bubble_fraction == pytest.approx(0.5)
