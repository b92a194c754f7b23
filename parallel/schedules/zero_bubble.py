"""Schedules with the backward in two parts, whose second part (W, the gradients of matrices) fills the bubbles.

Owns the search for their order: a simulated pipeline in which every stage takes what a fixed rule prefers among what it
could do now. It is deterministic, and what came out of a simulation can be run: it never waits for itself.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridflow.parallel.schedules.actions import Action, Kind, Schedule
from hybridflow.parallel.schedules.chunks import Chunks

WAYS = (Kind.F, Kind.B)


@dataclass(frozen=True)
class Rule:
    """What a stage prefers.

    Attributes:
        order: (kind, which of the stage's chunks) from the first choice to the last. W is done when nothing else can
            be: where the memory is full, or a message is awaited.
        most: for each stage how many activations it may hold.
        ahead: for each stage how many of them may be of its first chunk, counted until `until`.
        costs: of F, B and W in the simulated pipeline.
    """

    order: tuple[tuple[Kind, int], ...]
    most: tuple[int, ...]
    ahead: tuple[int, ...]
    until: Kind = Kind.W
    costs: tuple[int, int, int] = (10, 10, 10)


F0, F1, B0, B1 = ((kind, part) for kind in WAYS for part in (0, 1))
# Preferences, what of 2 pp the first chunk leaves free, how much more on each further stage, costs. The best of these
# eight is the best of 240 such rules in 22 of 26 sizes (pp 2 to 8, m 3 to 32) and within 1.2% of it in the others, by
# the measure below. Simulated costs that are a little unequal leave slack where the real ones, or messages, are slower.
V_RULES = (
    ((F1, F0, B0, B1), 1, 1.0, (10, 10, 10)),
    ((F1, B1, F0, B0), 1, 0.0, (10, 11, 9)),
    ((F1, B1, F0, B0), 2, 0.0, (10, 13, 7)),
    ((F1, F0, B0, B1), 1, 0.5, (10, 11, 9)),
    ((F1, F0, B1, B0), 1, 0.5, (10, 9, 11)),
    ((F1, B1, B0, F0), 1, 0.0, (10, 13, 7)),
    ((F1, F0, B0, B1), 1, 1.0, (10, 9, 11)),
    ((F1, F0, B0, B1), 1, 0.0, (10, 11, 9)),
)
# Orders are compared by the sum of the times they take with these costs of F, B, W and a hop between stages.
TRIALS = ((10, 10, 10, 0), (10, 10, 10, 1), (10, 12, 8, 1))
ENOUGH = 8  # rules are compared on no more than about this many micro-batches for each stage: by then an order repeats


def zb_h1(chunks: Chunks, m: int) -> Schedule:
    """ZB-H1 (arXiv 2401.10241 section 3): 1F1B in which stage s puts off the first W's, so that every stage holds as
    much as the first, min(pp, m). A stage idles (pp - 1) (F + B - W) from m = pp on.
    """
    pp = chunks.pp
    rule = Rule((F0, B0), most=(pp,) * pp, ahead=tuple(pp - stage for stage in range(pp)), until=Kind.B)
    return _schedule(chunks, m, _Simulation(chunks, m, rule).run())


def zb_v(chunks: Chunks, m: int) -> Schedule:
    """ZB-V (arXiv 2405.15362): the model goes down the stages and up again, so that a stage has early and late chunks
    and no one waits long for the first backward. Every stage holds at most 2 pp of its chunks' activations, as much of
    the model as the first stage of 1F1B. From m = pp on a stage idles (pp - 1) / 2 with F = B = W = 1 for both chunks
    together, the least that is possible, or a little more where that stands up better to unequal costs.
    """
    if chunks.pp == 1:
        return zb_h1(chunks, m)
    rules = [_v_rule(chunks.pp, *shape) for shape in V_RULES]
    few = min(m, ENOUGH * chunks.pp + m % chunks.pp)
    orders = [_Simulation(chunks, few, rule).run() for rule in rules]
    spans = [sum(_makespan(chunks, few, order, trial) for trial in TRIALS) for order in orders]
    best = min(range(len(rules)), key=spans.__getitem__)
    return _schedule(chunks, m, orders[best] if few == m else _Simulation(chunks, m, rules[best]).run())


def _v_rule(
    pp: int, order: tuple[tuple[Kind, int], ...], spare: int, slope: float, costs: tuple[int, int, int]
) -> Rule:
    """At least one place is kept for the way up, so that what is held can always move on."""
    ahead = tuple(max(1, int(2 * pp - spare - slope * stage)) for stage in range(pp))
    return Rule(order, most=(2 * pp,) * pp, ahead=ahead, costs=costs)


def _schedule(chunks: Chunks, m: int, order: Sequence[Action]) -> Schedule:
    stages: list[list[Action]] = [[] for _ in range(chunks.pp)]
    stage_of = [chunks.stage_of(chunk) for chunk in range(chunks.count)]
    for action in order:
        assert action.chunk is not None
        stages[stage_of[action.chunk]].append(action)
    return Schedule(chunks, m, tuple(map(tuple, stages)))


def _makespan(chunks: Chunks, m: int, order: Sequence[Action], trial: tuple[int, int, int, int]) -> int:
    """The time that each stage's share of `order` takes; `order` itself has everything behind what it uses."""
    forward, backward, weight, hop = trial
    stage_of = [chunks.stage_of(chunk) for chunk in range(chunks.count)]
    free = [0] * chunks.pp
    ends = {kind: [[0] * m for _ in range(chunks.count)] for kind in WAYS}
    f_ends, b_ends = ends[Kind.F], ends[Kind.B]
    for action in order:
        i, chunk = action.index, action.chunk
        assert i is not None and chunk is not None
        stage = stage_of[chunk]
        if action.kind is Kind.W:
            free[stage] += weight
        elif action.kind is Kind.F:
            arrival = 0 if chunk == 0 else f_ends[chunk - 1][i] + hop * (stage_of[chunk - 1] != stage)
            free[stage] = f_ends[chunk][i] = max(free[stage], arrival) + forward
        else:
            last = chunk == chunks.last
            arrival = 0 if last else b_ends[chunk + 1][i] + hop * (stage_of[chunk + 1] != stage)
            free[stage] = b_ends[chunk][i] = max(free[stage], arrival) + backward
    return max(free)


@dataclass
class _Simulation:
    """The pipeline whose stages follow a rule. Messages take no time.

    Attributes:
        input_at, grad_at: [chunk][micro-batch], from when on its F and its B can start.
        taken: by kind, how many each chunk has started; micro-batches go in their order.
        weights: for each stage the W's that its B's left, oldest first; so the last gradients are those of the chunk
            that backward reaches last.
    """

    chunks: Chunks
    m: int
    rule: Rule
    order: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        count, pp = self.chunks.count, self.chunks.pp
        self.of_stage = [self.chunks.of_stage(stage) for stage in range(pp)]
        self.stage_of = [self.chunks.stage_of(chunk) for chunk in range(count)]
        self.input_at = [[0.0 if chunk == 0 else math.inf] * self.m for chunk in range(count)]
        self.grad_at = [[math.inf] * self.m for _ in range(count)]
        self.forwards, self.backwards, self.finished = ([0] * count for _ in range(3))
        self.released = self.finished if self.rule.until is Kind.W else self.backwards
        self.weights: list[deque[tuple[int, int]]] = [deque() for _ in range(pp)]
        self.held, self.free = [0] * pp, [0] * pp
        self.looks = [(0, stage) for stage in range(pp)]  # a heap: when a stage may find something to do

    def run(self) -> list[Action]:
        """All computations in the order in which they start."""
        while self.looks:
            now, stage = heapq.heappop(self.looks)
            if self.free[stage] <= now:
                choice = self._choose(stage, now)
                if choice is not None:
                    self._start(stage, now, choice)
        assert len(self.order) == 3 * self.m * self.chunks.count, (self.chunks, self.m, self.rule)
        return self.order

    def _choose(self, stage: int, now: int) -> Action | None:
        for kind, part in self.rule.order:
            if part >= len(self.of_stage[stage]):
                continue
            chunk = self.of_stage[stage][part]
            if kind is Kind.B:
                i = self.backwards[chunk]
                if i < self.m and self.grad_at[chunk][i] <= now:
                    return Action(kind, i, chunk)
            else:
                i = self.forwards[chunk]
                if i < self.m and self.input_at[chunk][i] <= now and self._has_room(stage, part, chunk):
                    return Action(kind, i, chunk)
        return Action(Kind.W, *self.weights[stage][0]) if self.weights[stage] else None

    def _has_room(self, stage: int, part: int, chunk: int) -> bool:
        if self.held[stage] >= self.rule.most[stage]:
            return False
        return part > 0 or self.forwards[chunk] - self.released[chunk] < self.rule.ahead[stage]

    def _start(self, stage: int, now: int, action: Action) -> None:
        i, chunk = action.index, action.chunk
        assert i is not None and chunk is not None
        forward, backward, weight = self.rule.costs
        self.order.append(action)
        if action.kind is Kind.F:
            end = now + forward
            self.forwards[chunk] += 1
            self.held[stage] += 1
            if chunk < self.chunks.last:
                self.input_at[chunk + 1][i] = end
                heapq.heappush(self.looks, (end, self.stage_of[chunk + 1]))
            else:
                self.grad_at[chunk][i] = end
        elif action.kind is Kind.B:
            end = now + backward
            self.backwards[chunk] += 1
            self.weights[stage].append((i, chunk))
            if chunk > 0:
                self.grad_at[chunk - 1][i] = end
                heapq.heappush(self.looks, (end, self.stage_of[chunk - 1]))
        else:
            end = now + weight
            self.finished[chunk] += 1
            self.held[stage] -= 1
            self.weights[stage].popleft()
        self.free[stage] = end
        heapq.heappush(self.looks, (end, stage))
