"""Messages in flight: what waits for what can always go on, and what is held does not grow with the micro-batches."""

import pytest

from hybridflow.parallel.links import UNANSWERED_SENDS
from hybridflow.parallel.schedules.actions import RECEIVES, SENDS, Action, Kind, Schedule
from hybridflow.parallel.schedules.builders import ScheduleKind, forward_only
from hybridflow.parallel.schedules.chunks import ChunkOrder, Chunks
from hybridflow.parallel.schedules.messages import link_of, receive_for, receive_of, released_sends, with_messages


def ends(schedule: Schedule, unanswered: int) -> bool:
    """Play a schedule in which a transfer is over once both ends have started it and those before it on its link, and
    a send starts only when less than `unanswered` others of its link are not over.
    """
    chunks, places, over, moved = schedule.chunks, [0] * schedule.chunks.pp, set(), True
    sent, posted, arrived = {}, {}, {}

    def blocked(action: Action) -> bool:
        if action.kind in SENDS:
            link = link_of(chunks, action)
            return sent.get(link, 0) - arrived.get(link, 0) >= unanswered
        receive = receive_for(chunks, action) if action.kind in (Kind.F, Kind.B) else None
        return receive is not None and receive not in over

    while moved:
        moved = False
        for stage, actions in enumerate(schedule.stages):
            while places[stage] < len(actions) and not blocked(actions[places[stage]]):
                action = actions[places[stage]]
                if action.kind in SENDS + RECEIVES:
                    link = link_of(chunks, action)
                    if action.kind in SENDS:
                        sent[link] = sent.get(link, 0) + 1
                    else:
                        posted.setdefault(link, []).append(action)
                    while arrived.get(link, 0) < min(sent.get(link, 0), len(posted.get(link, []))):
                        over.add(posted[link][arrived.get(link, 0)])
                        arrived[link] = arrived.get(link, 0) + 1
                places[stage] += 1
                moved = True
    return all(place == len(actions) for place, actions in zip(places, schedule.stages))


@pytest.mark.parametrize("chunks", [
    *(Chunks(pp, vpp) for pp in (1, 2, 3, 4, 5, 8) for vpp in (1, 2, 3, 4)),
    *(Chunks(pp, 2, ChunkOrder.V) for pp in (2, 3, 4, 5, 8)),
], ids=lambda chunks: f"pp{chunks.pp} vpp{chunks.vpp} {chunks.order.value}")
def test_forwards_end_with_few_sends_on_a_link(chunks: Chunks):
    for m in (1, 2, 3, 4, 5, 7, 8, 9, 21):
        assert ends(with_messages(forward_only(chunks, m)), UNANSWERED_SENDS), m


def test_the_play_finds_a_lock():
    """All forwards of a chunk before those of the next: the ring is full before anyone takes from it."""
    chunks, m = Chunks(2, 2), 12
    stages = tuple(tuple(Action(Kind.F, i, c) for c in chunks.of_stage(s) for i in range(m)) for s in range(2))
    assert not ends(with_messages(Schedule(chunks, m, stages)), UNANSWERED_SENDS)
    assert ends(with_messages(Schedule(chunks, m, stages)), m)


def most_sends_held(schedule: Schedule, stage: int) -> int:
    """Sends of `stage` that no answer has confirmed, at most."""
    released, held, most = released_sends(schedule, stage), set(), 0
    for action in schedule.stages[stage]:
        if action.kind in SENDS:
            held.add(action)
            most = max(most, len(held))
        receive = receive_for(schedule.chunks, action) if action.kind in (Kind.F, Kind.B) else None
        if receive is not None:
            held -= set(released[receive])
    return most


@pytest.mark.parametrize("kind, vpp", [(ScheduleKind.ONE_F_ONE_B, 1), (ScheduleKind.INTERLEAVED, 2),
                                       (ScheduleKind.ZB_H1, 1), (ScheduleKind.ZB_V, 2)])
def test_answers_let_go_of_all_but_a_few_sends(kind: ScheduleKind, vpp: int):
    chunks = kind.chunks(4, vpp)
    held = {m: [most_sends_held(with_messages(kind.compute(chunks, m)), stage) for stage in range(4)]
            for m in (32, 96)}
    assert held[32] == held[96]
    assert max(held[96]) <= 4 * vpp * 2


def test_every_answer_names_sends_of_this_stage_once():
    for kind, vpp in ((ScheduleKind.ONE_F_ONE_B, 1), (ScheduleKind.INTERLEAVED, 3)):
        schedule = with_messages(kind.compute(kind.chunks(4, vpp), 9))
        for stage, actions in enumerate(schedule.stages):
            named = [send for sends in released_sends(schedule, stage).values() for send in sends]
            assert len(named) == len(set(named)) and set(named) <= set(actions)
            assert {receive_of(send).kind for send in named} <= set(RECEIVES)
