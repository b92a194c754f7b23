"""Messages: who sends what to whom, receives in the order of sends, few of them ahead, buffers freed in time."""

from collections import Counter

import pytest

from hybridflow.parallel.schedules.actions import COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.schedules.chunks import ChunkOrder, Chunks
from hybridflow.parallel.schedules.messages import (
    link_of,
    receive_for,
    receive_of,
    released_sends,
    send_after,
    send_of,
    with_messages,
)
from hybridflow.parallel.schedules.training import build
from tests.parallel.schedules.grids import chunks_of

F, B, W = Kind.F, Kind.B, Kind.W
GOLDEN_V_2_2 = """\
stage 0: F0.0 SEND_F0.0 RECV_F0.3 F1.0 SEND_F1.0 F0.3 RECV_F1.3 B0.3 SEND_B0.3 F1.3 B1.3 SEND_B1.3 RECV_B0.0 W0.3 B0.0 \
RECV_B1.0 W1.3 REDUCE0 B1.0 W0.0 W1.0 REDUCE1 STEP RESHARD0
stage 1: RECV_F0.1 F0.1 RECV_F1.1 F0.2 SEND_F0.2 F1.1 RECV_B0.2 F1.2 SEND_F1.2 B0.2 RECV_B1.2 B0.1 SEND_B0.1 B1.2 B1.1 \
SEND_B1.1 W0.2 W0.1 W1.2 REDUCE0 W1.1 REDUCE1 STEP"""


def test_both_ends_of_a_message() -> None:
    chunks = Chunks(4, 2, ChunkOrder.V)  # stages 0 1 2 3 3 2 1 0
    assert send_after(chunks, Action(F, 5, 1)) == Action(Kind.SEND_F, 5, 1)
    assert receive_of(Action(Kind.SEND_F, 5, 1)) == Action(Kind.RECV_F, 5, 2) == receive_for(chunks, Action(F, 5, 2))
    assert send_after(chunks, Action(B, 5, 6)) == Action(Kind.SEND_B, 5, 6)
    assert receive_of(Action(Kind.SEND_B, 5, 6)) == Action(Kind.RECV_B, 5, 5) == receive_for(chunks, Action(B, 5, 5))
    for send in (Action(Kind.SEND_F, 5, 1), Action(Kind.SEND_B, 5, 6)):
        assert send_of(receive_of(send)) == send
        assert link_of(chunks, send) == link_of(chunks, receive_of(send)) == (1, 2)


def test_what_has_no_message() -> None:
    chunks = Chunks(4, 2, ChunkOrder.V)
    for compute in (Action(F, 0, 7), Action(B, 0, 0), Action(F, 0, 3), Action(B, 0, 4), Action(W, 0, 2)):
        assert send_after(chunks, compute) is None
    for compute in (Action(F, 0, 0), Action(B, 0, 7), Action(F, 0, 4), Action(B, 0, 3), Action(W, 0, 2)):
        assert receive_for(chunks, compute) is None
    alone = build(ScheduleKind.GPIPE, Chunks(1), 3)
    assert not [action for action in alone.stages[0] if action.kind in SENDS + RECEIVES]


def test_golden_text_with_both_chunk_directions() -> None:
    kind = ScheduleKind.ZB_V
    assert build(kind, kind.chunks(2, 2), 2, [(3, 0), (2, 1)], [1, 0]).to_text() == GOLDEN_V_2_2


def test_a_message_that_is_used_late_is_received_in_turn() -> None:
    """Stage 0 sends 0 and 1, stage 1 uses 1 first: it must take 0 from the link before."""
    compute = Schedule.from_text("stage 0: F0.0 F1.0 F2.0\nstage 1: F1.1 F0.1 F2.1", Chunks(2))
    assert with_messages(compute).to_text().splitlines()[1] == \
        "stage 1: RECV_F0.1 RECV_F1.1 F1.1 RECV_F2.1 F0.1 F2.1"


@pytest.mark.parametrize("kind", ScheduleKind)
def test_few_messages_wait_on_a_link(kind: ScheduleKind) -> None:
    for pp in (2, 3, 4, 8):
        for chunks in chunks_of(kind, pp):
            for m in (1, 2, 5, 8, 17):
                assert most_posted(build(kind, chunks, m)) <= 3


def most_posted(schedule: Schedule) -> int:
    most = 0
    for actions in schedule.stages:
        waiting: Counter = Counter()
        for action in actions:
            if action.kind in RECEIVES:
                link = link_of(schedule.chunks, action)
                waiting[link] += 1
                most = max(most, waiting[link])
            elif action.kind in COMPUTE and (receive := receive_for(schedule.chunks, action)) is not None:
                waiting[link_of(schedule.chunks, receive)] -= 1
    return most


def test_sends_are_released_by_the_answer_that_needed_them() -> None:
    schedule = build(ScheduleKind.ONE_F_ONE_B, Chunks(2), 3)
    released = released_sends(schedule, stage=0)
    assert released[Action(Kind.RECV_B, 0, 0)] == (Action(Kind.SEND_F, 0, 0),)
    assert released[Action(Kind.RECV_B, 1, 0)] == (Action(Kind.SEND_F, 1, 0),)
    # Stage 0 runs B0 between sending F1 and F2, so F2's arrival shows stage 1 that its first gradient was taken.
    assert released_sends(schedule, stage=1)[Action(Kind.RECV_F, 2, 1)] == (Action(Kind.SEND_B, 0, 1),)


@pytest.mark.parametrize("kind", ScheduleKind)
def test_released_sends_were_used_before_what_releases_them_was_sent(kind: ScheduleKind) -> None:
    for pp in (2, 3, 4):
        for chunks in chunks_of(kind, pp):
            schedule = build(kind, chunks, 6)
            places = [{action: place for place, action in enumerate(actions)} for actions in schedule.stages]
            uses = {receive_for(chunks, action): action for actions in schedule.stages for action in actions
                    if action.kind in COMPUTE}
            for stage in range(pp):
                released = released_sends(schedule, stage)
                receives = {action for action in schedule.stages[stage] if action.kind in RECEIVES}
                freed = [send for sends in released.values() for send in sends]
                assert set(released) == receives and len(set(freed)) == len(freed)
                for receive, sends in released.items():
                    other = link_of(chunks, receive)[0]
                    for send in sends:
                        assert send in places[stage] and link_of(chunks, send) == (stage, other)
                        assert places[other][uses[receive_of(send)]] < places[other][send_of(receive)]
