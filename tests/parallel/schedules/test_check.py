"""The checker: faults planted in right schedules are refused, and the message names the stage and the action."""

import re

import pytest

from hybridflow.parallel.schedules.actions import Action, Kind, Schedule
from hybridflow.parallel.schedules.builders import ScheduleKind, forward_only
from hybridflow.parallel.schedules.check import peak_in_flight, validate
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.schedules.messages import with_messages
from hybridflow.parallel.schedules.training import build
from tests.parallel.schedules.grids import buckets_of, chunks_of

ONE_F_ONE_B, ZB_H1, ZB_V = ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1, ScheduleKind.ZB_V


def whole(kind: ScheduleKind, pp: int = 2, m: int = 3) -> Schedule:
    chunks = chunks_of(kind, pp)[0]
    return build(kind, chunks, m, buckets_of(chunks), [1] * pp)


@pytest.mark.parametrize(
    ("kind", "old", "new", "message"),
    [
        (ONE_F_ONE_B, "F1.0 SEND_F1.0", "SEND_F1.0", "stage 0 misses F1.0 and has none too many"),
        (ONE_F_ONE_B, "F0.0 SEND_F0.0", "SEND_F0.0 F0.0", "stage 0 has SEND_F0.0 before F0.0"),
        (ONE_F_ONE_B, "RECV_B0.0 ", "", "stage 0 misses RECV_B0.0 and has none too many"),
        (ONE_F_ONE_B, "RECV_F1.1 B0.1 SEND_B0.1 F1.1", "B0.1 SEND_B0.1 F1.1 RECV_F1.1",
         "stage 1 has F1.1 before RECV_F1.1"),
        (ONE_F_ONE_B, "REDUCE0", "REDUCE0 REDUCE0", "stage 0 has REDUCE0 twice"),
        (ONE_F_ONE_B, "B2.0 REDUCE0", "REDUCE0 B2.0",
         "stage 0 has REDUCE0 behind B1.0, but chunk 0 has gradients to come"),
        (ONE_F_ONE_B, "STEP", "SEND_B0.0 STEP", "stage 0 misses none and has SEND_B0.0 too many"),
        (ONE_F_ONE_B, "REDUCE1 STEP", "STEP REDUCE1", "stage 0 has STEP before REDUCE1"),
        (ONE_F_ONE_B, " STEP RESHARD0", " RESHARD0", "stage 0 misses STEP and has none too many"),
        (ONE_F_ONE_B, "STEP RESHARD0", "RESHARD0 STEP", "stage 0 has RESHARD0 before STEP"),
        (ONE_F_ONE_B, "REDUCE0 ", "", "stage 0 misses REDUCE0 and has REDUCE1 too many"),
        (ONE_F_ONE_B, " F2.1", " F2.0", "stage 1 misses F2.1 and has F2.0 too many"),
        (ONE_F_ONE_B, "SEND_B2.1 STEP", "STEP SEND_B2.1", "stage 1 has STEP before SEND_B2.1"),
        (ZB_H1, "W2.0 REDUCE0 REDUCE1", "REDUCE0 REDUCE1 W2.0", "stage 0 has REDUCE0 behind W1.0, but chunk 0 has"),
        (ZB_H1, "B0.0 W0.0", "W0.0 B0.0", "stage 0 has W0.0 before B0.0"),
        (ZB_H1, "W2.0 REDUCE0 REDUCE1 STEP", "REDUCE0 REDUCE1 STEP W2.0", "stage 0 has REDUCE0 behind W1.0"),
        (ZB_H1, "W1.1 ", "", "stage 1 misses W1.1 and has none too many"),
        (ZB_V, "F0.1 RECV_F1.1 F0.2", "F0.2 RECV_F1.1 F0.1", "stage 1 has F0.2 before F0.1"),
    ],
)
def test_planted_faults_are_named(kind: ScheduleKind, old: str, new: str, message: str) -> None:
    right = whole(kind)
    validate(right, buckets=buckets_of(right.chunks))
    text = right.to_text()
    assert old in text
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(Schedule.from_text(text.replace(old, new, 1), right.chunks))


def test_a_link_is_read_in_the_order_in_which_it_is_written() -> None:
    right = with_messages(forward_only(Chunks(2), 3)).to_text()
    wrong = right.replace("RECV_F0.1 RECV_F1.1", "RECV_F1.1 RECV_F0.1")
    with pytest.raises(ValueError, match=r"stage 1 has RECV_F1.1 where stage 0 has SEND_F0.0: the messages of a link"):
        validate(Schedule.from_text(wrong, Chunks(2)))
    wrong = "stage 0: F0.0 F1.0 SEND_F1.0 SEND_F0.0\nstage 1: RECV_F0.1 RECV_F1.1 F0.1 F1.1"
    with pytest.raises(ValueError, match=r"stage 1 has RECV_F0.1 where stage 0 has SEND_F1.0"):
        validate(Schedule.from_text(wrong, Chunks(2)))


def test_stages_that_wait_for_each_other() -> None:
    """Stage 1 wants F1 before it does B0, stage 0 wants B0 before it sends F1."""
    text = "stage 0: F0.0 SEND_F0.0 RECV_B0.0 B0.0 F1.0 SEND_F1.0 RECV_B1.0 B1.0 STEP\n" \
           "stage 1: RECV_F0.1 RECV_F1.1 F0.1 F1.1 B0.1 SEND_B0.1 B1.1 SEND_B1.1 STEP"
    with pytest.raises(ValueError, match=r"never ends: waiting at B0.0 on stage 0, F1.1 on stage 1"):
        validate(Schedule.from_text(text, Chunks(2)))


def test_a_cycle_through_several_stages() -> None:
    right = ONE_F_ONE_B.compute(Chunks(4), 4).to_text()
    wrong = right.replace("F3.0 B0.0", "B0.0 F3.0", 1).replace("F0.3 B0.3 F1.3 B1.3 F2.3 B2.3 F3.3 B3.3",
                                                            "F0.3 F1.3 F2.3 F3.3 B0.3 B1.3 B2.3 B3.3")
    chunks = Chunks(4)
    assert wrong != right
    with pytest.raises(ValueError, match=r"never ends: waiting at B0.0 on stage 0, .*F2.3 on stage 3"):
        validate(with_updates_of(with_messages(Schedule.from_text(wrong, chunks))))


def with_updates_of(schedule: Schedule) -> Schedule:
    stages = tuple((*actions, Action(Kind.STEP)) for actions in schedule.stages)
    return Schedule(schedule.chunks, schedule.num_micro_batches, stages)


@pytest.mark.parametrize("kind", ScheduleKind)
def test_any_two_neighbours_swapped_are_refused_or_harmless(kind: ScheduleKind) -> None:
    """Harmless: what does not touch the other. The rest is refused, whatever the pair."""
    right = whole(kind, pp=3, m=4)
    buckets = buckets_of(right.chunks)
    refused = 0
    for stage, actions in enumerate(right.stages):
        for place in range(len(actions) - 1):
            swapped = [*actions[:place], actions[place + 1], actions[place], *actions[place + 2 :]]
            stages = (*right.stages[:stage], tuple(swapped), *right.stages[stage + 1 :])
            try:
                validate(Schedule(right.chunks, right.num_micro_batches, stages), buckets=buckets)
            except ValueError as error:
                refused += 1
                assert f"stage {stage}" in str(error)
            else:
                assert not must_stay(actions[place], actions[place + 1])
    assert refused > len(right.stages[0]) // 3


def must_stay(first: Action, second: Action) -> bool:
    """Whether the second certainly needs the first: the same micro-batch and chunk in its own order, or the update."""
    order = (Kind.RECV_F, Kind.F, Kind.SEND_F), (Kind.RECV_B, Kind.B, Kind.SEND_B), (Kind.B, Kind.W), (Kind.F, Kind.B)
    same = (first.index, first.chunk) == (second.index, second.chunk)
    pairs = [pair for kinds in order for pair in zip(kinds, kinds[1:], strict=False)]
    return same and (first.kind, second.kind) in pairs or Kind.STEP in (first.kind, second.kind)


@pytest.mark.parametrize("kind", ScheduleKind)
def test_any_action_dropped_or_doubled_is_refused(kind: ScheduleKind) -> None:
    right = whole(kind, pp=3, m=3)
    for stage, actions in enumerate(right.stages):
        for place, action in enumerate(actions):
            dropped = [()] if action.kind is not Kind.RESHARD else []  # how many of these there should be, nobody knows
            for middle in ((action, action), *dropped):
                changed = (*actions[:place], *middle, *actions[place + 1 :])
                stages = (*right.stages[:stage], changed, *right.stages[stage + 1 :])
                with pytest.raises(ValueError, match=f"stage {stage}"):
                    validate(Schedule(right.chunks, right.num_micro_batches, stages), None, buckets_of(right.chunks))


def test_a_reduce_of_another_chunk_is_seen_where_the_buckets_are_known() -> None:
    right = whole(ZB_V)
    (late, *_), buckets = right.chunks.of_stage(0), buckets_of(right.chunks)
    first = right.to_text().replace("REDUCE2", "X").replace("REDUCE0", "REDUCE2").replace("X", "REDUCE0")
    with pytest.raises(ValueError, match=f"stage 0 has REDUCE2 behind W2.3, but chunk {late} has gradients to come"):
        validate(Schedule.from_text(first, right.chunks), buckets=buckets)


def test_too_many_activations() -> None:
    schedule = build(ScheduleKind.GPIPE, Chunks(2), 5)
    assert peak_in_flight(schedule) == (5, 5)
    validate(schedule, max_in_flight=(5, 5))
    with pytest.raises(ValueError, match=r"stage 1 holds 5 activations at once, allowed are 2: F2.1 is one too many"):
        validate(schedule, max_in_flight=(5, 2))


def test_another_number_of_stages() -> None:
    with pytest.raises(ValueError, match="a schedule for 3 stages has the actions of 2"):
        validate(Schedule(Chunks(3), 1, forward_only(Chunks(2), 1).stages))
