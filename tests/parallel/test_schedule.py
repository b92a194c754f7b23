"""Schedules: golden texts, completeness, memory bounds, freedom from deadlock, text round trip."""

import itertools

import pytest

from hybridflow.parallel.schedule import (
    Action,
    Kind,
    Schedule,
    forward_only,
    gpipe,
    one_f_one_b,
    peak_in_flight,
    released_sends,
    validate,
)

BUILDERS = (gpipe, one_f_one_b, forward_only)
GOLDEN_1F1B_3_4 = """\
stage 0: F0 SEND_F0 F1 SEND_F1 RECV_B0 F2 SEND_F2 B0 RECV_B1 F3 SEND_F3 RECV_B2 B1 RECV_B3 B2 B3 REDUCE STEP
stage 1: RECV_F0 F0 SEND_F0 RECV_F1 RECV_B0 F1 SEND_F1 RECV_F2 B0 SEND_B0 RECV_B1 F2 SEND_F2 RECV_F3 B1 SEND_B1 \
RECV_B2 F3 SEND_F3 B2 SEND_B2 RECV_B3 B3 SEND_B3 REDUCE STEP
stage 2: RECV_F0 F0 RECV_F1 B0 SEND_B0 F1 RECV_F2 B1 SEND_B1 F2 RECV_F3 B2 SEND_B2 F3 B3 SEND_B3 REDUCE STEP"""
GOLDEN_GPIPE_2_3 = """\
stage 0: F0 SEND_F0 F1 SEND_F1 RECV_B0 F2 SEND_F2 RECV_B1 B0 RECV_B2 B1 B2 REDUCE STEP
stage 1: RECV_F0 RECV_F1 F0 RECV_F2 F1 F2 B0 SEND_B0 B1 SEND_B1 B2 SEND_B2 REDUCE STEP"""
GOLDEN_FORWARD_3_2 = """\
stage 0: F0 SEND_F0 F1 SEND_F1
stage 1: RECV_F0 F0 SEND_F0 RECV_F1 F1 SEND_F1
stage 2: RECV_F0 RECV_F1 F0 F1"""


def test_golden_texts() -> None:
    assert one_f_one_b(3, 4).to_text() == GOLDEN_1F1B_3_4
    assert gpipe(2, 3).to_text() == GOLDEN_GPIPE_2_3
    assert forward_only(3, 2).to_text() == GOLDEN_FORWARD_3_2
    assert one_f_one_b(1, 2).to_text() == "stage 0: F0 B0 F1 B1 REDUCE STEP"


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7])
def test_every_size_is_complete_ends_and_reads_back(pp: int) -> None:
    for m, build in itertools.product(range(1, 10), BUILDERS):
        schedule = build(pp, m)
        validate(schedule)
        assert Schedule.from_text(schedule.to_text()) == schedule


def test_activations_held() -> None:
    assert peak_in_flight(one_f_one_b(4, 9)) == (4, 3, 2, 1)
    assert peak_in_flight(one_f_one_b(4, 2)) == (2, 2, 2, 1)
    assert peak_in_flight(gpipe(2, 5)) == (5, 5)
    validate(one_f_one_b(4, 9), max_in_flight=(4, 3, 2, 1))
    with pytest.raises(ValueError, match="stage 0 holds 5 micro-batches at once, allowed are 2"):
        validate(gpipe(2, 5), max_in_flight=(2, 2))


def test_sends_are_released_by_the_answer_that_needed_them() -> None:
    released = released_sends(one_f_one_b(2, 3), stage=0)
    assert released[Action(Kind.RECV_B, 0, 0)] == (Action(Kind.SEND_F, 0, 0),)
    assert released[Action(Kind.RECV_B, 1, 0)] == (Action(Kind.SEND_F, 1, 0),)
    # Stage 0 runs B0 between sending F1 and F2, so F2's arrival shows stage 1 that its first gradient was taken.
    assert released_sends(one_f_one_b(2, 3), stage=1)[Action(Kind.RECV_F, 2, 1)] == (Action(Kind.SEND_B, 0, 1),)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text.replace("F1 SEND_F1 ", "SEND_F1 "), "stage 0 misses F1 and has none too many"),
        (lambda text: text.replace("F0 SEND_F0", "SEND_F0 F0"), "stage 0 has SEND_F0 before F0"),
        (lambda text: text.replace("REDUCE", "REDUCE REDUCE"), "stage 0 has REDUCE twice"),
        (lambda text: text.replace("B2 REDUCE", "REDUCE B2", 1), "stage 0 has REDUCE before B2"),
        (lambda text: text.replace("STEP", "SEND_B0 STEP", 1), "stage 0 misses none and has SEND_B0 too many"),
        # Stage 1 waits for F1 before it does B0, stage 0 for B0 before it sends F1.
        (lambda _: "stage 0: F0 SEND_F0 RECV_B0 B0 F1 SEND_F1 RECV_B1 B1 REDUCE STEP\n"
                   "stage 1: RECV_F0 RECV_F1 F0 F1 B0 SEND_B0 B1 SEND_B1 REDUCE STEP", "never ends.*F1 on stage 1"),
        # The two sides of a connection disagree about the order of messages.
        (lambda _: "stage 0: F0 F1 SEND_F1 SEND_F0\nstage 1: RECV_F0 RECV_F1 F0 F1", "never ends: waiting at F0 on"),
    ],
)
def test_faults_are_named(edit, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(Schedule.from_text(edit(one_f_one_b(2, 3).to_text())))


@pytest.mark.parametrize("text", ["stage 1: F0", "F0", "stage 0: X0", "stage 0: F", "stage 0: STEP3"])
def test_text_that_is_no_schedule(text: str) -> None:
    with pytest.raises(ValueError, match="schedule must start|is not an action"):
        Schedule.from_text(text)


def test_sizes_below_one() -> None:
    for build in BUILDERS:
        with pytest.raises(ValueError, match="at least one stage and one micro-batch"):
            build(2, 0)
