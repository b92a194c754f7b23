"""How long a schedule takes under a model of its costs: the simulator of what `pipeline` runs.

Owns the cost model. It never decides an order, knows no device and measures nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hybridflow.parallel.schedules.actions import COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule
from hybridflow.parallel.schedules.messages import Link, link_of, receive_for, receive_of
from hybridflow.parallel.schedules.timeline import PerChunk, Span, Timeline, per_chunk


@dataclass(frozen=True)
class Costs:
    """What actions cost. Example: `Costs(forward=0.010, backward=0.011, weight=0.009, alpha=2e-5)`.

    Attributes:
        forward, backward, weight: seconds of F, B and W of one micro-batch in a chunk. A B whose W is not in the
            schedule does both and costs backward + weight.
        reduce: seconds of a bucket's reduce, for all buckets or for each by its number.
        overlap_reduce: whether a reduce runs beside the computation, one bucket of a stage at a time: of n REDUCEs
            behind a backward, the k-th can begin when (k + 1)/n of that backward is over. Else it stops the stage.
        step: seconds of the optimizer step.
        reshard: seconds of sending one bucket of new weights.
        alpha: seconds that any message takes on a link.
        beta: seconds for each byte of it.
        message_bytes: bytes of a message.
    """

    forward: PerChunk = 1.0
    backward: PerChunk = 1.0
    weight: PerChunk = 1.0
    reduce: PerChunk = 0.0
    overlap_reduce: bool = True
    step: float = 0.0
    reshard: float = 0.0
    alpha: float = 0.0
    beta: float = 0.0
    message_bytes: float = 0.0

    @property
    def message(self) -> float:
        """Seconds of one message on its link: alpha + beta x bytes."""
        return self.alpha + self.beta * self.message_bytes


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run a schedule in simulated time.

    A stage does its computations one after another, each as soon as the messages that it needs are there. A send takes
    no time of the stage: the message goes onto its link when it is posted and the messages before it are through, one
    at a time and in order (a link is one direction between two stages). STEP begins on all stages together, when the
    last gradient of the last stage is reduced, since the gradient's norm needs them all. Time is linear in the
    number of actions.

    Raises:
        ValueError: a computation whose message is not received or never sent.
    """
    return _Simulation(schedule, costs).run()


@dataclass
class _Stage:
    """Where a stage is: its next action, when it is free, when its last reduce is over, and what it has done."""

    actions: tuple[Action, ...]
    split: set[tuple[int | None, int | None]]  # (micro-batch, chunk) whose backward leaves a W
    reduces: dict[int, tuple[int, int]]  # place of a REDUCE -> (its rank, how many there are) behind its computation
    place: int = 0
    free: float = 0.0
    reduced: float = 0.0
    last: Span | None = None  # the last computation
    posted: dict[Action, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    @classmethod
    def of(cls, actions: tuple[Action, ...]) -> _Stage:
        split = {(action.index, action.chunk) for action in actions if action.kind is Kind.W}
        return cls(actions, split, _reduces(actions))

    def take(self, action: Action, start: float, seconds: float) -> Span:
        """Spend the stage's own time on an action."""
        span = Span(action, start, start + seconds)
        self.spans.append(span)
        self.free = span.end
        return span


class _Simulation:
    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.chunks = schedule.chunks
        self.costs = costs
        self.stages = [_Stage.of(actions) for actions in schedule.stages]
        self.arrivals: dict[Action, float] = {}  # by the receive
        self.waiting: dict[Action, int] = {}  # receive -> the stage that can do nothing without it
        self.links: dict[Link, float] = {}  # when each is free
        self.steppers = {s for s, actions in enumerate(schedule.stages) if any(a.kind is Kind.STEP for a in actions)}
        self.at_step: dict[int, float] = {}  # stage -> when all of its gradients are reduced
        self.runnable = deque(range(len(self.stages)))

    def run(self) -> Timeline:
        while self.runnable:
            self._advance(self.runnable.popleft())
        stuck = [f"{stage.actions[stage.place]} on stage {s}" for s, stage in enumerate(self.stages)
                 if stage.place < len(stage.actions)]
        if stuck:
            raise ValueError(f"the schedule never ends: waiting at {', '.join(stuck)}")
        return Timeline(tuple(tuple(sorted(stage.spans, key=lambda span: span.start)) for stage in self.stages))

    def _advance(self, s: int) -> None:
        """Let a stage go on until it needs what another one has not done yet."""
        stage = self.stages[s]
        while stage.place < len(stage.actions):
            action = stage.actions[stage.place]
            if action.kind in COMPUTE:
                if not self._compute(s, action):
                    return
            elif action.kind is Kind.STEP:
                if not self._step(s, action):
                    return
            elif action.kind in SENDS:
                self._send(s, action)
            elif action.kind in RECEIVES:
                stage.posted[action] = stage.free
            elif action.kind is Kind.REDUCE:
                self._reduce(stage, action)
            else:
                stage.take(action, stage.free, self.costs.reshard)
            stage.place += 1

    def _compute(self, s: int, action: Action) -> bool:
        """Do a computation; False if its message is not on its way yet."""
        stage, start, receive = self.stages[s], self.stages[s].free, receive_for(self.chunks, action)
        if receive is not None:
            if receive not in stage.posted:
                raise ValueError(f"stage {s} runs {action} without {receive} before it")
            if receive not in self.arrivals:
                self.waiting[receive] = s
                return False
            arrival = self.arrivals[receive]
            stage.spans.append(Span(receive, min(stage.posted[receive], arrival), arrival))
            start = max(start, arrival)
        stage.last = stage.take(action, start, self._seconds(stage, action))
        return True

    def _seconds(self, stage: _Stage, action: Action) -> float:
        if action.kind is Kind.F:
            return per_chunk(self.costs.forward, action.chunk)
        weight = per_chunk(self.costs.weight, action.chunk)
        if action.kind is Kind.W:
            return weight
        left = (action.index, action.chunk) in stage.split
        return per_chunk(self.costs.backward, action.chunk) + (0.0 if left else weight)

    def _send(self, s: int, action: Action) -> None:
        receive, link = receive_of(action), link_of(self.chunks, action)
        start = max(self.stages[s].free, self.links.get(link, 0.0))
        self.links[link] = self.arrivals[receive] = start + self.costs.message
        self.stages[s].spans.append(Span(action, start, self.arrivals[receive]))
        if receive in self.waiting:
            self.runnable.append(self.waiting.pop(receive))

    def _reduce(self, stage: _Stage, action: Action) -> None:
        seconds = per_chunk(self.costs.reduce, action.index)
        if not self.costs.overlap_reduce:
            stage.reduced = stage.take(action, stage.free, seconds).end
            return
        rank, count = stage.reduces[stage.place]
        complete = 0.0 if stage.last is None else stage.last.start + (rank + 1) / count * stage.last.duration
        start = max(complete, stage.reduced)
        stage.reduced = start + seconds
        stage.spans.append(Span(action, start, stage.reduced))

    def _step(self, s: int, action: Action) -> bool:
        """Do the optimizer step; False if other stages are not there yet."""
        if s not in self.at_step:
            self.at_step[s] = max(self.stages[s].free, self.stages[s].reduced)
            if self.at_step.keys() == self.steppers:
                self.runnable.extend(self.steppers - {s})
        if self.at_step.keys() != self.steppers:
            return False
        self.stages[s].take(action, max(self.at_step.values()), self.costs.step)
        return True


def _reduces(actions: tuple[Action, ...]) -> dict[int, tuple[int, int]]:
    """For the place of each REDUCE: its rank among those behind the same computation, and how many these are."""
    groups: list[list[int]] = [[]]
    for place, action in enumerate(actions):
        if action.kind is Kind.REDUCE:
            groups[-1].append(place)
        elif action.kind in COMPUTE:
            groups.append([])
    return {place: (rank, len(group)) for group in groups for rank, place in enumerate(group)}
