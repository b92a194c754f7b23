"""Pipeline schedules as data: for each stage, the actions it takes in order.

Owns their generation, the insertion of communication, validation and the text form. Pure Python: it never touches a
tensor or a process group; `pipeline` runs what is written here. Three separate steps make a schedule: a builder writes
the computation, `with_communication` adds sends and receives, `validate` proves that it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What an action does. Its value is its name in the text form."""

    F = "F"  # forward of a micro-batch
    B = "B"  # backward of a micro-batch
    SEND_F = "SEND_F"  # start sending the stage's output to the next stage
    RECV_F = "RECV_F"  # post the receive of the stage's input; the F that uses it waits for it
    SEND_B = "SEND_B"  # start sending the gradient of the stage's input to the previous stage
    RECV_B = "RECV_B"  # post the receive of the output's gradient; the B that uses it waits for it
    REDUCE = "REDUCE"  # reduce the accumulated gradients over data-parallel ranks
    STEP = "STEP"  # optimizer step


COMPUTE = (Kind.F, Kind.B)
SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)
SEND_OF = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}
RECV_OF = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}
FLOW = {Kind.F: 1, Kind.B: -1, Kind.SEND_F: 1, Kind.RECV_F: 1, Kind.SEND_B: -1, Kind.RECV_B: -1}  # stages a hop moves


@dataclass(frozen=True)
class Action:
    """One step of one stage. `micro_batch` is None for REDUCE and STEP. Example: `Action(Kind.F, 3, stage=1)`."""

    kind: Kind
    micro_batch: int | None
    stage: int

    def __str__(self) -> str:
        return self.kind.value if self.micro_batch is None else f"{self.kind.value}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of every stage. Example: `one_f_one_b(2, 3)`, in time (REDUCE and STEP end each row):

        stage 0   F0 F1 .  B0 F2 B1 .  B2
        stage 1   .  F0 B0 F1 B1 F2 B2 .
    """

    stages: tuple[tuple[Action, ...], ...]
    num_micro_batches: int

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def has_backward(self) -> bool:
        return any(action.kind is Kind.B for action in self.stages[0])

    def to_text(self) -> str:
        """One line for each stage: `stage 0: F0 SEND_F0 RECV_B0 B0 REDUCE STEP`."""
        return "\n".join(f"stage {i}: " + " ".join(map(str, actions)) for i, actions in enumerate(self.stages))

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Read what `to_text` wrote.

        Raises:
            ValueError: a line or an action that is none (it is named).
        """
        stages = []
        for index, line in enumerate(text.strip().splitlines()):
            head, colon, actions = line.partition(":")
            if not colon or head.split() != ["stage", str(index)]:
                raise ValueError(f"line {index + 1} of a schedule must start with 'stage {index}:', not {line[:20]!r}")
            stages.append(tuple(_action(word, index) for word in actions.split()))
        numbers = [action.micro_batch for actions in stages for action in actions if action.micro_batch is not None]
        return cls(tuple(stages), max(numbers, default=-1) + 1)


def gpipe(pp: int, m: int) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965); every stage holds `m` micro-batches' activations."""
    _check_sizes(pp, m)
    order = [(Kind.F, i) for i in range(m)] + [(Kind.B, i) for i in range(m)]
    return _training(pp, m, [order] * pp)


def one_f_one_b(pp: int, m: int) -> Schedule:
    """Stage s runs min(pp - s - 1, m) forwards ahead, then one forward and one backward in turn (PipeDream-Flush,
    arXiv 2006.09503; Megatron-LM, arXiv 2104.04473): it holds at most min(pp - s, m) micro-batches' activations.
    """
    _check_sizes(pp, m)
    orders = []
    for stage in range(pp):
        warm_up = min(pp - stage - 1, m)
        order = [(Kind.F, i) for i in range(warm_up)]
        for i in range(m):
            order += [(Kind.F, i + warm_up)] * (i + warm_up < m) + [(Kind.B, i)]
        orders.append(order)
    return _training(pp, m, orders)


def forward_only(pp: int, m: int) -> Schedule:
    """Forwards alone: log-probabilities, values, scores."""
    _check_sizes(pp, m)
    stages = tuple(tuple(Action(Kind.F, i, stage) for i in range(m)) for stage in range(pp))
    return with_communication(Schedule(stages, m))


def with_communication(compute: Schedule) -> Schedule:
    """Add the sends and receives between neighbouring stages.

    A send follows its computation at once. A receive is posted one computation ahead of the one that uses it, so that
    it overlaps, but never before an earlier send in the same direction: on a backend that runs the operations of a
    process group in order, that send would wait for the neighbour's next micro-batch.
    """
    last = compute.num_stages - 1
    return Schedule(tuple(_with_communication(actions, last) for actions in compute.stages), compute.num_micro_batches)


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each stage, the most micro-batches whose forward is done and whose backward is not."""
    peaks = []
    for actions in schedule.stages:
        held = peak = 0
        for action in actions:
            held += (action.kind is Kind.F) - (action.kind is Kind.B)
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def validate(schedule: Schedule, max_in_flight: tuple[int, ...] | None = None) -> None:
    """Prove that a schedule computes everything once, ends, and holds no more activations than allowed.

    It must end even where the sends and receives of one stage in one direction run strictly in order and a transfer
    needs both sides (NCCL with one communicator for each process group), the hardest case.

    Args:
        max_in_flight: for each stage the most micro-batches it may hold; None: any number.
    Raises:
        ValueError: naming the stage and the action at fault.
    """
    for stage, actions in enumerate(schedule.stages):
        _check_stage(stage, actions, schedule)
    _check_ends(schedule)
    if max_in_flight is not None:
        for stage, (peak, most) in enumerate(zip(peak_in_flight(schedule), max_in_flight, strict=True)):
            if peak > most:
                raise ValueError(f"stage {stage} holds {peak} micro-batches at once, allowed are {most}")


def released_sends(schedule: Schedule, stage: int) -> dict[Action, tuple[Action, ...]]:
    """For each receive of `stage`, the sends of `stage` that are known to be over once it is: before the neighbour
    made that message it had used what they carried. Their buffers can be freed then without waiting for anyone.
    """
    released: dict[Action, tuple[Action, ...]] = {}
    for neighbour, message, use in ((stage - 1, Kind.SEND_F, Kind.B), (stage + 1, Kind.SEND_B, Kind.F)):
        used: list[Action] = []
        for action in schedule.stages[neighbour] if 0 <= neighbour < schedule.num_stages else ():
            if action.kind is use:
                used.append(Action(SEND_OF[use], action.micro_batch, stage))
            elif action.kind is message:
                released[Action(RECV_OF[message], action.micro_batch, stage)] = tuple(used)
                used = []
    return released


def _check_sizes(pp: int, m: int) -> None:
    if pp < 1 or m < 1:
        raise ValueError(f"a schedule needs at least one stage and one micro-batch, got pp {pp}, micro-batches {m}")


def _training(pp: int, m: int, orders: list[list[tuple[Kind, int]]]) -> Schedule:
    stages = []
    for stage, order in enumerate(orders):
        end = (Action(Kind.REDUCE, None, stage), Action(Kind.STEP, None, stage))
        stages.append((*(Action(kind, i, stage) for kind, i in order), *end))
    return with_communication(Schedule(tuple(stages), m))


def _has_source(action: Action, last: int) -> bool:
    return action.kind in COMPUTE and 0 <= action.stage - FLOW[action.kind] <= last


def _has_target(action: Action, last: int) -> bool:
    return action.kind in COMPUTE and 0 <= action.stage + FLOW[action.kind] <= last


def _with_communication(actions: tuple[Action, ...], last: int) -> tuple[Action, ...]:
    out: list[Action] = []
    posted = 0  # receives are already out for actions[:posted]
    for place, action in enumerate(actions):
        following = actions[place + 1 : place + 2]
        sends = _has_target(action, last)
        ahead = [a for a in following if not (sends and a.kind is action.kind)]
        for needs in (*actions[max(posted, place) : place + 1], *ahead):
            if _has_source(needs, last):
                out.append(Action(RECV_OF[needs.kind], needs.micro_batch, needs.stage))
        posted = place + 1 + len(ahead)
        out.append(action)
        if sends:
            out.append(Action(SEND_OF[action.kind], action.micro_batch, action.stage))
    return tuple(out)


def _check_stage(stage: int, actions: tuple[Action, ...], schedule: Schedule) -> None:
    where = {action: place for place, action in enumerate(actions)}
    if len(where) != len(actions):
        twice = next(a for place, a in enumerate(actions) if where[a] != place)
        raise ValueError(f"stage {stage} has {twice} twice")
    wanted = _wanted(stage, schedule)
    missing, extra = wanted - where.keys(), where.keys() - wanted
    if missing or extra:
        listed = [", ".join(sorted(map(str, some))) or "none" for some in (missing, extra)]
        raise ValueError(f"stage {stage} misses {listed[0]} and has {listed[1]} too many")
    for earlier, later in _orders(actions):
        if earlier in where and where[earlier] > where[later]:
            raise ValueError(f"stage {stage} has {later} before {earlier}")


def _wanted(stage: int, schedule: Schedule) -> set[Action]:
    last = schedule.num_stages - 1
    kinds = COMPUTE if schedule.has_backward else (Kind.F,)
    wanted = {Action(kind, i, stage) for kind in kinds for i in range(schedule.num_micro_batches)}
    for action in list(wanted):
        if _has_source(action, last):
            wanted.add(Action(RECV_OF[action.kind], action.micro_batch, stage))
        if _has_target(action, last):
            wanted.add(Action(SEND_OF[action.kind], action.micro_batch, stage))
    if schedule.has_backward:
        wanted |= {Action(Kind.REDUCE, None, stage), Action(Kind.STEP, None, stage)}
    return wanted


def _orders(actions: tuple[Action, ...]) -> list[tuple[Action, Action]]:
    """Pairs that must come in this order within a stage, where both are there."""
    pairs = []
    for action in actions:
        if action.kind in COMPUTE:
            pairs.append((Action(RECV_OF[action.kind], action.micro_batch, action.stage), action))
        if action.kind is Kind.B:
            pairs.append((Action(Kind.F, action.micro_batch, action.stage), action))
        if action.kind in SENDS:
            source = Kind.F if action.kind is Kind.SEND_F else Kind.B
            pairs.append((Action(source, action.micro_batch, action.stage), action))
        if action.kind is Kind.REDUCE:
            pairs += [(other, action) for other in actions if other.kind is Kind.B]
        if action.kind is Kind.STEP:
            pairs.append((Action(Kind.REDUCE, None, action.stage), action))
    return pairs


def _check_ends(schedule: Schedule) -> None:
    """Play the schedule until nothing moves: a stage is blocked only by a computation whose receive is not over."""
    places = [0] * schedule.num_stages
    queues: dict[tuple[int, int], list[Action]] = {}  # (stage, flow) -> operations started and not over, in order
    over: set[Action] = set()
    moved = True
    while moved:
        moved = _match_heads(queues, over)
        for stage, actions in enumerate(schedule.stages):
            while places[stage] < len(actions) and _can_run(actions[places[stage]], over, schedule.num_stages - 1):
                action = actions[places[stage]]
                if action.kind in SENDS + RECEIVES:
                    queues.setdefault((stage, FLOW[action.kind]), []).append(action)
                places[stage] += 1
                moved = True
    stuck = [f"{actions[places[stage]]} on stage {stage}" for stage, actions in enumerate(schedule.stages)
             if places[stage] < len(actions)]
    stuck += [f"{queue[0]} on stage {stage}" for (stage, _), queue in queues.items() if queue]
    if stuck:
        raise ValueError(f"the schedule never ends: waiting at {', '.join(stuck)}")


def _can_run(action: Action, over: set[Action], last: int) -> bool:
    return not _has_source(action, last) or Action(RECV_OF[action.kind], action.micro_batch, action.stage) in over


def _match_heads(queues: dict[tuple[int, int], list[Action]], over: set[Action]) -> bool:
    """Finish every transfer whose send and receive are both the oldest operation of their queue."""
    moved = False
    for (stage, flow), queue in queues.items():
        while queue and queue[0].kind in SENDS:
            receiver = queues.get((stage + flow, flow), [])
            if not receiver or receiver[0] != Action(RECV_OF[queue[0].kind], queue[0].micro_batch, stage + flow):
                break
            over |= {queue.pop(0), receiver.pop(0)}
            moved = True
    return moved


def _action(word: str, stage: int) -> Action:
    name = word.rstrip("0123456789")
    number = word[len(name) :]
    names = {kind.value: kind for kind in Kind}
    if name not in names or (number == "") != (name in (Kind.REDUCE.value, Kind.STEP.value)):
        raise ValueError(f"{word!r} on stage {stage} is not an action: use F0, SEND_F0, RECV_B1, REDUCE, STEP, ...")
    return Action(names[name], int(number) if number else None, stage)
