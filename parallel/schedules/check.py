"""The proof that a schedule is right: complete, in order, agreed between stages, ending, within its memory.

Owns the rules that every schedule must keep, whoever wrote it. It never repairs one. Time is near linear in the number
of actions.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from hybridflow.parallel.schedules.actions import COMPUTE, OF_BUCKETS, RECEIVES, SENDS, STEP, Action, Kind, Schedule
from hybridflow.parallel.schedules.messages import Link, link_of, receive_for, receive_of, send_after

LISTED = 5  # as many faults of one sort are named


def peak_in_flight(schedule: Schedule) -> tuple[float, ...]:
    """For each stage the most activations that it holds at once, in units of one micro-batch in one chunk.

    A forward adds one. It goes with the backward; where that is split with W, which still needs the inputs of the
    matrices (so this counts the part that B could free as held too). Forwards alone hold nothing.
    """
    if not schedule.has_backward:
        return (0.0,) * schedule.chunks.pp
    peaks, release = [], Kind.W if schedule.splits_backward else Kind.B
    for actions in schedule.stages:
        held = peak = 0
        for action in actions:
            held += (action.kind is Kind.F) - (action.kind is release)
            peak = max(peak, held)
        peaks.append(float(peak))
    return tuple(peaks)


def validate(
    schedule: Schedule, max_in_flight: Sequence[float] | None = None, buckets: Sequence[Sequence[int]] | None = None
) -> None:
    """Prove that a schedule computes everything once, ends, updates after its gradients, and fits in memory.

    It must end even where the messages of one link run strictly in order and a transfer needs both sides (NCCL with one
    communicator for each link), the hardest case.

    Args:
        max_in_flight: for each stage the most activations that it may hold, as `peak_in_flight` counts; None: any.
        buckets: for each stage the chunk of each of its gradient buckets, as `with_updates` takes them. None: there can
            be any, and each REDUCE must follow the last gradient of some chunk.
    Raises:
        ValueError: naming the stage and the action at fault.
    """
    pp = schedule.chunks.pp
    if len(schedule.stages) != pp:
        raise ValueError(f"a schedule for {pp} stages has the actions of {len(schedule.stages)}")
    for stage in range(pp):
        chunk_of_bucket = None if buckets is None else buckets[stage]
        _check_complete(schedule, stage, chunk_of_bucket)
        _check_order(schedule, stage)
        _check_updates(schedule, stage, chunk_of_bucket)
    _check_links(schedule)
    _check_ends(schedule)
    if max_in_flight is not None:
        for stage, (peak, most) in enumerate(zip(peak_in_flight(schedule), max_in_flight, strict=True)):
            if peak > most:
                raise ValueError(f"stage {stage} holds {peak:g} activations at once, allowed are {most:g}: "
                                 f"{_first_above(schedule, stage, most)} is one too many")


def _check_complete(schedule: Schedule, stage: int, chunk_of_bucket: Sequence[int] | None) -> None:
    actions = schedule.stages[stage]
    have = set(actions)
    if len(have) != len(actions):
        twice = next(action for action, count in Counter(actions).items() if count > 1)
        raise ValueError(f"stage {stage} has {twice} twice")
    wanted = _wanted(schedule, stage, chunk_of_bucket)
    if have != wanted:
        missing, extra = (_names(some) for some in (wanted - have, have - wanted))
        raise ValueError(f"stage {stage} misses {missing} and has {extra} too many")


def _wanted(schedule: Schedule, stage: int, chunk_of_bucket: Sequence[int] | None) -> set[Action]:
    chunks, wanted = schedule.chunks, set()
    kinds = COMPUTE if schedule.splits_backward else (Kind.F, Kind.B) if schedule.has_backward else (Kind.F,)
    for chunk in chunks.of_stage(stage):
        computes = [Action(kind, 0, chunk) for kind in kinds]
        messages = [find(chunks, compute) for compute in computes for find in (receive_for, send_after)]
        for first in (*computes, *messages):
            if first is not None:
                wanted |= {Action(first.kind, i, chunk) for i in range(schedule.num_micro_batches)}
    if schedule.has_backward:
        count = Counter(action.kind for action in schedule.stages[stage] if action.kind in OF_BUCKETS)
        if chunk_of_bucket is not None:
            count[Kind.REDUCE] = len(chunk_of_bucket)
        wanted |= {STEP} | {Action(kind, i) for kind in OF_BUCKETS for i in range(count[kind])}
    return wanted


def _check_order(schedule: Schedule, stage: int) -> None:
    """Each computation and send behind what it uses from its own stage."""
    done: set[Action] = set()
    for action in schedule.stages[stage]:
        for earlier in _uses(schedule, action):
            if earlier not in done:
                raise ValueError(f"stage {stage} has {action} before {earlier}")
        done.add(action)


def _uses(schedule: Schedule, action: Action) -> list[Action]:
    kind, i, chunk, chunks = action.kind, action.index, action.chunk, schedule.chunks
    if chunk is None or kind in RECEIVES:
        return []
    if kind in SENDS:
        return [Action(Kind.F if kind is Kind.SEND_F else Kind.B, i, chunk)]
    if kind is Kind.W:
        return [Action(Kind.B, i, chunk)]
    uses = [] if kind is Kind.F else [Action(Kind.F, i, chunk)]
    message, source = receive_for(chunks, action), chunk + (-1 if kind is Kind.F else 1)
    if message is not None:
        uses.append(message)
    elif 0 <= source <= chunks.last:
        uses.append(Action(kind, i, source))  # the neighbouring chunk is on this stage
    return uses


def _check_updates(schedule: Schedule, stage: int, chunk_of_bucket: Sequence[int] | None) -> None:
    """REDUCE when its chunk has all gradients, STEP when everything is reduced, RESHARD when weights are new."""
    gradient = Kind.W if schedule.splits_backward else Kind.B
    open_chunks = dict.fromkeys(schedule.chunks.of_stage(stage), schedule.num_micro_batches)
    latest, stepped = None, False
    for action in schedule.stages[stage]:
        if action.kind is gradient and action.chunk is not None:
            open_chunks[action.chunk], latest = open_chunks[action.chunk] - 1, action
        elif action.kind is Kind.REDUCE and action.index is not None:
            chunk = chunk_of_bucket[action.index] if chunk_of_bucket else None if latest is None else latest.chunk
            if chunk is None or open_chunks[chunk]:
                raise ValueError(f"stage {stage} has {action} behind {latest or 'nothing'}, but chunk {chunk} has "
                                 "gradients to come")
        if action == STEP:
            stepped = True
        elif stepped and action.kind is not Kind.RESHARD:  # a message too: a stage that needs it never reaches its STEP
            raise ValueError(f"stage {stage} has STEP before {action}")
        if not stepped and action.kind is Kind.RESHARD:
            raise ValueError(f"stage {stage} has {action} before STEP")


def _check_links(schedule: Schedule) -> None:
    """Both sides of a link name the same messages in the same order."""
    sends: dict[Link, list[Action]] = {}
    receives: dict[Link, list[Action]] = {}
    for actions in schedule.stages:
        for action in actions:
            if action.kind in SENDS:
                sends.setdefault(link_of(schedule.chunks, action), []).append(action)
            elif action.kind in RECEIVES:
                receives.setdefault(link_of(schedule.chunks, action), []).append(action)
    for link, sent in sends.items():
        for send, receive in zip(sent, receives[link], strict=True):
            if receive != receive_of(send):
                raise ValueError(f"stage {link[1]} has {receive} where stage {link[0]} has {send}: the messages of a "
                                 "link are received in the order in which they are sent")


def _check_ends(schedule: Schedule) -> None:
    """Play the schedule: a stage waits only where a computation's message is not there yet.

    Once both sides of every link agree about its order, a transfer is over as soon as its own two sides have started:
    all before it on the link have.
    """
    places = [0] * schedule.chunks.pp
    halves: set[Action] = set()  # receives of which one side has started
    arrived: set[Action] = set()
    ready = deque(range(schedule.chunks.pp))
    while ready:
        stage = ready.popleft()
        actions = schedule.stages[stage]
        while places[stage] < len(actions):
            action = actions[places[stage]]
            message = receive_for(schedule.chunks, action) if action.kind in COMPUTE else None
            if message is not None and message not in arrived:
                break
            places[stage] += 1
            if action.kind in SENDS or action.kind in RECEIVES:
                receive = receive_of(action) if action.kind in SENDS else action
                if receive in halves:
                    arrived.add(receive)
                    ready.append(link_of(schedule.chunks, receive)[1])
                halves.add(receive)
    waiting = [f"{actions[place]} on stage {stage}"
               for stage, (place, actions) in enumerate(zip(places, schedule.stages, strict=True))
               if place < len(actions)]
    if waiting:
        raise ValueError(f"the schedule never ends: waiting at {', '.join(waiting)}")


def _first_above(schedule: Schedule, stage: int, most: float) -> Action:
    release, held = Kind.W if schedule.splits_backward else Kind.B, 0
    for action in schedule.stages[stage]:
        held += (action.kind is Kind.F) - (action.kind is release)
        if held > most:
            return action
    raise AssertionError("the peak is above, so some action is")


def _names(actions: set[Action]) -> str:
    named = sorted(map(str, actions))
    return ", ".join(named[:LISTED]) + (f" and {len(named) - LISTED} more" if len(named) > LISTED else "") or "none"
