"""Schedule builders: golden texts, every size complete and ending within its promised memory, and their bubbles."""

import pytest

from hybridflow.parallel.schedules.actions import Kind, Schedule
from hybridflow.parallel.schedules.builders import ScheduleKind, activation_bound, forward_only
from hybridflow.parallel.schedules.check import peak_in_flight, validate
from hybridflow.parallel.schedules.chunks import ChunkOrder, Chunks
from hybridflow.parallel.schedules.simulate import Costs, simulate
from hybridflow.parallel.schedules.training import build
from tests.parallel.schedules.grids import MS, PPS, buckets_of, chunks_of, forwards

GPIPE, ONE_F_ONE_B, INTERLEAVED = ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED
GOLDEN = {
    (GPIPE, 2, 1, 2): """\
stage 0: F0.0 F1.0 B0.0 B1.0
stage 1: F0.1 F1.1 B0.1 B1.1""",
    (ONE_F_ONE_B, 4, 1, 6): """\
stage 0: F0.0 F1.0 F2.0 F3.0 B0.0 F4.0 B1.0 F5.0 B2.0 B3.0 B4.0 B5.0
stage 1: F0.1 F1.1 F2.1 B0.1 F3.1 B1.1 F4.1 B2.1 F5.1 B3.1 B4.1 B5.1
stage 2: F0.2 F1.2 B0.2 F2.2 B1.2 F3.2 B2.2 F4.2 B3.2 F5.2 B4.2 B5.2
stage 3: F0.3 B0.3 F1.3 B1.3 F2.3 B2.3 F3.3 B3.3 F4.3 B4.3 F5.3 B5.3""",
    (ONE_F_ONE_B, 4, 1, 2): """\
stage 0: F0.0 F1.0 B0.0 B1.0
stage 1: F0.1 F1.1 B0.1 B1.1
stage 2: F0.2 F1.2 B0.2 B1.2
stage 3: F0.3 B0.3 F1.3 B1.3""",
    (INTERLEAVED, 2, 2, 4): """\
stage 0: F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 F3.0 B1.2 F2.2 B0.0 F3.2 B1.0 B2.2 B3.2 B2.0 B3.0
stage 1: F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 F3.1 B1.1 F2.3 B2.3 F3.3 B3.3 B2.1 B3.1""",
    (INTERLEAVED, 2, 2, 3): """\
stage 0: F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 B1.2 F2.2 B0.0 B1.0 B2.2 B2.0
stage 1: F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 B1.1 F2.3 B2.3 B2.1""",
}
WHOLE_1F1B = """\
stage 0: F0.0 SEND_F0.0 F1.0 SEND_F1.0 RECV_B0.0 F2.0 SEND_F2.0 B0.0 RECV_B1.0 F3.0 SEND_F3.0 RECV_B2.0 B1.0 RECV_B3.0 \
B2.0 B3.0 REDUCE0 REDUCE1 STEP RESHARD0 RESHARD1
stage 1: RECV_F0.1 RECV_F1.1 F0.1 SEND_F0.1 RECV_B0.1 F1.1 SEND_F1.1 RECV_F2.1 B0.1 SEND_B0.1 RECV_B1.1 F2.1 \
SEND_F2.1 RECV_F3.1 B1.1 SEND_B1.1 RECV_B2.1 F3.1 SEND_F3.1 RECV_B3.1 B2.1 SEND_B2.1 B3.1 REDUCE0 SEND_B3.1 STEP
stage 2: RECV_F0.2 F0.2 RECV_F1.2 B0.2 SEND_B0.2 F1.2 RECV_F2.2 B1.2 SEND_B1.2 F2.2 RECV_F3.2 B2.2 SEND_B2.2 F3.2 \
B3.2 REDUCE0 SEND_B3.2 STEP RESHARD0"""


@pytest.mark.parametrize(("kind", "pp", "vpp", "m"), GOLDEN)
def test_golden_texts(kind: ScheduleKind, pp: int, vpp: int, m: int) -> None:
    assert kind.compute(kind.chunks(pp, vpp), m).to_text() == GOLDEN[kind, pp, vpp, m]


def test_a_whole_schedule() -> None:
    schedule = build(ONE_F_ONE_B, ONE_F_ONE_B.chunks(3, 1), 4, buckets=[[0, 0], [1], [2]], reshards=[2, 0, 1])
    assert schedule.to_text() == WHOLE_1F1B
    alone = ScheduleKind.GPIPE.chunks(1, 1)
    assert build(ScheduleKind.GPIPE, alone, 2).to_text() == "stage 0: F0.0 F1.0 B0.0 B1.0 STEP"
    assert build(ScheduleKind.ZB_V, alone, 2, [[0]]).to_text() == "stage 0: F0.0 B0.0 W0.0 F1.0 B1.0 W1.0 REDUCE0 STEP"


def test_forward_only_texts() -> None:
    assert forward_only(Chunks(2, 2), 3).to_text() == "stage 0: F0.0 F1.0 F0.2 F1.2 F2.0 F2.2\n" \
                                                      "stage 1: F0.1 F1.1 F0.3 F1.3 F2.1 F2.3"
    assert forward_only(Chunks(2, 2, ChunkOrder.V), 3).to_text() == "stage 0: F0.0 F1.0 F0.3 F2.0 F1.3 F2.3\n" \
                                                                    "stage 1: F0.1 F0.2 F1.1 F1.2 F2.1 F2.2"


@pytest.mark.parametrize("kind", ScheduleKind)
@pytest.mark.parametrize("pp", PPS)
def test_every_size_is_complete_ends_and_fits(kind: ScheduleKind, pp: int) -> None:
    for chunks in chunks_of(kind, pp):
        for m in MS:
            buckets = buckets_of(chunks)
            schedule = build(kind, chunks, m, buckets, reshards=range(pp))
            validate(schedule, activation_bound(kind, chunks, m), buckets)
            assert schedule.num_micro_batches == m
            if m in (1, pp, 7):
                assert Schedule.from_text(schedule.to_text(), chunks) == schedule


@pytest.mark.parametrize("pp", PPS)
def test_every_forward_is_complete_and_ends(pp: int) -> None:
    for m in MS:
        for schedule in forwards(pp, m):
            validate(schedule)


def test_activations_held() -> None:
    def held(kind: ScheduleKind, pp: int, vpp: int, m: int) -> tuple[float, ...]:
        chunks = kind.chunks(pp, vpp)
        peaks = peak_in_flight(kind.compute(chunks, m))
        assert all(peak <= most for peak, most in zip(peaks, activation_bound(kind, chunks, m), strict=True))
        return peaks

    assert held(GPIPE, 2, 1, 5) == (5, 5)
    assert held(ONE_F_ONE_B, 4, 1, 9) == (4, 3, 2, 1)
    assert held(ONE_F_ONE_B, 4, 1, 2) == (2, 2, 2, 1)
    assert held(INTERLEAVED, 4, 2, 8) == (11, 9, 7, 5)
    assert held(ScheduleKind.ZB_H1, 4, 1, 9) == (4, 4, 4, 4)
    assert max(held(ScheduleKind.ZB_V, 4, 2, 64)) == 8
    assert peak_in_flight(forward_only(Chunks(2), 5)) == (0, 0)


def test_the_last_gradients_of_a_stage_are_of_its_first_chunk() -> None:
    """A weight that two chunks of a stage share (tied embedding and head, in V order) is complete with the first's."""
    for kind in (INTERLEAVED, ScheduleKind.ZB_V):
        for pp in (2, 3, 4):
            for chunks in chunks_of(kind, pp):
                for m in (1, 2, 3, 5, 8, 13):
                    for stage, actions in enumerate(kind.compute(chunks, m).stages):
                        assert actions[-1].chunk == chunks.of_stage(stage)[0]


def test_bubbles_of_the_closed_forms() -> None:
    """F = 1, B = 2: (pp - 1)(F + B) idle, a vpp-th of it where interleaved (arXiv 2104.04473 section 2.2)."""
    for pp, m in ((2, 4), (4, 8), (4, 16), (8, 16)):
        for kind, vpp in ((GPIPE, 1), (ONE_F_ONE_B, 1), (INTERLEAVED, 2), (INTERLEAVED, 3)):
            line = simulate(build(kind, kind.chunks(pp, vpp), m), Costs())
            assert line.makespan == 3 * vpp * m + 3 * (pp - 1)
    for pp in (2, 3, 4, 8):  # a group that is not full costs something, but never as much as not to interleave
        for m in (1, 2, 3, 5, 7, 9, 15):
            line = simulate(build(INTERLEAVED, INTERLEAVED.chunks(pp, 2), m), Costs(0.5, 0.5, 0.5))
            assert line.makespan <= 3 * m + 3 * (pp - 1)


def test_forwards_of_both_chunk_orders_leave_no_bubble_but_the_ends() -> None:
    for schedule in forwards(4, 8):
        vpp, ends = schedule.chunks.vpp, 6 if schedule.chunks.order is ChunkOrder.V else 3
        assert simulate(schedule, Costs()).makespan == vpp * 8 + ends


@pytest.mark.parametrize(
    ("kind", "pp", "vpp", "rule"),
    [
        (ONE_F_ONE_B, 4, 2, "vpp 2 does not go with the schedule 1f1b: it must be 1"),
        (INTERLEAVED, 4, 1, "vpp 1 does not go with the schedule interleaved: it must be at least 2"),
        (ScheduleKind.ZB_V, 4, 3, "vpp 3 does not go with the schedule zb-v: it must be 2"),
        (INTERLEAVED, 1, 2, r"vpp 2 does not go with the schedule interleaved: it must be 1 with one stage \(pp 1\)"),
    ],
)
def test_chunks_that_a_schedule_cannot_have(kind: ScheduleKind, pp: int, vpp: int, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        kind.chunks(pp, vpp)


def test_chunks_of_another_schedule_and_no_micro_batch() -> None:
    with pytest.raises(ValueError, match="the schedule zb-v cannot run on"):
        ScheduleKind.ZB_V.compute(Chunks(4, 2), 8)
    for make in (lambda: GPIPE.compute(Chunks(2), 0), lambda: forward_only(Chunks(2), 0)):
        with pytest.raises(ValueError, match="at least one micro-batch, got 0"):
            make()


def test_split_backwards_are_where_the_name_says() -> None:
    for kind in ScheduleKind:
        schedule = kind.compute(chunks_of(kind, 2)[0], 3)
        assert schedule.splits_backward == (kind in (ScheduleKind.ZB_H1, ScheduleKind.ZB_V))
        assert all(action.kind in (Kind.F, Kind.B, Kind.W) for actions in schedule.stages for action in actions)
