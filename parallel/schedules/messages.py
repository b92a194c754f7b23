"""The messages of a schedule: what travels between chunks, in which order, and when a sent buffer is free again.

Owns the correspondence of computations, sends and receives, and their insertion. A link is one direction between two
neighbouring stages: its messages arrive in the order in which they were sent, and links do not wait for each other.
Neighbouring chunks on the same stage have no message: the runner hands the tensor over.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.parallel.schedules.actions import COMPUTE, Action, Kind, Schedule
from hybridflow.parallel.schedules.chunks import Chunks

Link = tuple[int, int]  # (from stage, to stage)
AHEAD = 1  # receives are posted this many computations before the one that uses them


def receive_for(chunks: Chunks, compute: Action) -> Action | None:
    """The receive whose message `compute` uses, on its own stage; None: its input is there, or made on this stage."""
    assert compute.chunk is not None, compute
    if compute.kind is Kind.F and _parted(chunks, compute.chunk - 1):
        return Action(Kind.RECV_F, compute.index, compute.chunk)
    if compute.kind is Kind.B and _parted(chunks, compute.chunk):
        return Action(Kind.RECV_B, compute.index, compute.chunk)
    return None


def send_after(chunks: Chunks, compute: Action) -> Action | None:
    """The send of what `compute` made, on its own stage; None: nothing of it leaves the stage."""
    assert compute.chunk is not None, compute
    if compute.kind is Kind.F and _parted(chunks, compute.chunk):
        return Action(Kind.SEND_F, compute.index, compute.chunk)
    if compute.kind is Kind.B and _parted(chunks, compute.chunk - 1):
        return Action(Kind.SEND_B, compute.index, compute.chunk)
    return None


def receive_of(send: Action) -> Action:
    """The other end of a send. Example: SEND_F3.0 is received by RECV_F3.1."""
    assert send.chunk is not None, send
    if send.kind is Kind.SEND_F:
        return Action(Kind.RECV_F, send.index, send.chunk + 1)
    assert send.kind is Kind.SEND_B, send
    return Action(Kind.RECV_B, send.index, send.chunk - 1)


def send_of(receive: Action) -> Action:
    """The other end of a receive. Example: RECV_F3.1 gets what SEND_F3.0 sent."""
    assert receive.chunk is not None, receive
    if receive.kind is Kind.RECV_F:
        return Action(Kind.SEND_F, receive.index, receive.chunk - 1)
    assert receive.kind is Kind.RECV_B, receive
    return Action(Kind.SEND_B, receive.index, receive.chunk + 1)


def link_of(chunks: Chunks, message: Action) -> Link:
    """(from stage, to stage) of a send or a receive."""
    assert message.chunk is not None, message
    mine = chunks.stage_of(message.chunk)
    if message.kind is Kind.SEND_F:
        return mine, chunks.stage_of(message.chunk + 1)
    if message.kind is Kind.SEND_B:
        return mine, chunks.stage_of(message.chunk - 1)
    if message.kind is Kind.RECV_F:
        return chunks.stage_of(message.chunk - 1), mine
    assert message.kind is Kind.RECV_B, message
    return chunks.stage_of(message.chunk + 1), mine


def with_messages(schedule: Schedule) -> Schedule:
    """Add the sends and receives to a schedule of computations.

    A send follows its computation at once. A receive is posted before the computation ahead of the one that uses it, so
    that the transfer overlaps, and not earlier, so that few buffers wait; on every link receives are posted in the
    order of the sends, which may pull one in that is used later.
    """
    chunks = schedule.chunks
    queues: dict[Link, list[Action]] = {}  # receives in the order of their sends
    for actions in schedule.stages:
        for action in actions:
            assert action.kind in COMPUTE, f"{action} is there before the messages are"
            send = send_after(chunks, action)
            if send is not None:
                queues.setdefault(link_of(chunks, send), []).append(receive_of(send))
    stages = tuple(tuple(_with_messages(chunks, actions, queues)) for actions in schedule.stages)
    return Schedule(chunks, schedule.num_micro_batches, stages)


def released_sends(schedule: Schedule, stage: int) -> dict[Action, tuple[Action, ...]]:
    """For each receive of `stage`, the sends of `stage` that are known to be over once its message is there: before the
    neighbour made that message it had used what they carried. Their buffers can be freed without waiting for anyone.
    """
    chunks = schedule.chunks
    released: dict[Action, tuple[Action, ...]] = {}
    for neighbour in _neighbours(chunks, stage):
        used: list[Action] = []
        for action in schedule.stages[neighbour]:
            if action.kind in COMPUTE:
                receive = receive_for(chunks, action)
                if receive is not None and link_of(chunks, receive) == (stage, neighbour):
                    used.append(send_of(receive))
            elif action.kind in (Kind.SEND_F, Kind.SEND_B) and link_of(chunks, action) == (neighbour, stage):
                released[receive_of(action)] = tuple(used)
                used = []
    return released


def _parted(chunks: Chunks, chunk: int) -> bool:
    """Whether a message is between `chunk` and the next one: both exist, on different stages."""
    return 0 <= chunk < chunks.last and chunks.stage_of(chunk) != chunks.stage_of(chunk + 1)


def _neighbours(chunks: Chunks, stage: int) -> list[int]:
    around = {c + hop for c in chunks.of_stage(stage) for hop in (-1, 1) if 0 <= c + hop <= chunks.last}
    return sorted({chunks.stage_of(c) for c in around} - {stage})


def _with_messages(chunks: Chunks, actions: tuple[Action, ...], queues: dict[Link, list[Action]]) -> Iterator[Action]:
    posted: dict[Link, int] = {}
    needs = [receive_for(chunks, action) for action in actions]
    links = {link_of(chunks, need) for need in needs if need is not None}
    place = {receive: k for link in links for k, receive in enumerate(queues[link])}
    for at, action in enumerate(actions):
        for need in needs[0 if at == 0 else at + AHEAD : at + AHEAD + 1]:
            if need is not None:
                link = link_of(chunks, need)
                start, end = posted.get(link, 0), place[need] + 1
                yield from queues[link][start:end]
                posted[link] = max(start, end)
        yield action
        send = send_after(chunks, action)
        if send is not None:
            yield send
