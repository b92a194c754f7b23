"""A machine that executes plans as a runner would, on cells that hold what a key would depend on: the tokens so far.

The right response of a request is known without it. Whatever a token attends to is compared with what must be there, so
a block that is shared, copied, given up or handed out wrongly shows where it happens.
"""

from collections import deque

import numpy as np

from hybridflow.generation.blocks import BLOCK_TOKENS
from hybridflow.generation.scheduler import Request, Scheduler, Sequence, StepPlan

MASK = 2**63 - 1


def content(before: int, token: int) -> int:
    """What stands at a position: it depends on the token and on all before it."""
    value = (before * 6364136223846793005 + token * 1442695040888963407 + 1013904223) & MASK
    return value ^ (value >> 29)


def draw(value: int, index: int) -> int:
    """The token that request `index` samples behind content `value`: samples of one prompt differ."""
    return ((value ^ (index + 1) * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 >> 31) % 1000


def is_stop(token: int, stop_every: int) -> bool:
    return stop_every > 0 and token % stop_every == 0


def alone(request: Request, stop_every: int = 0) -> list[int]:
    """The response that a request must get."""
    value = 0
    for token in request.ids + request.begun:
        value = content(value, token)
    response: list[int] = []
    while len(response) < request.max_new_tokens:
        response.append(draw(value, request.index))
        if is_stop(response[-1], stop_every):
            break
        value = content(value, response[-1])
    return response


class Truth:
    """The tokens of a sequence as the device has them, and what the cache must hold for each of them."""

    def __init__(self, request: Request, length: int) -> None:
        self.tokens: list[int] = []
        self.contents = np.zeros(length, np.int64)
        self.last = 0
        for token in request.ids + request.begun:
            self.append(token)

    def append(self, token: int) -> None:
        self.last = content(self.last, token)
        self.contents[len(self.tokens)] = self.last
        self.tokens.append(token)


class Machine:
    """Cells of blocks and newest tokens by slot; `run` is one step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.cells = np.full((scheduler.pool.num_blocks, BLOCK_TOKENS), -1, np.int64)
        self.newest: dict[int, int] = {}
        self.truths: dict[Sequence, Truth] = {}

    def truth(self, sequence: Sequence) -> Truth:
        if sequence not in self.truths:
            # a lagging engine samples a token more than there is room for
            self.truths[sequence] = Truth(sequence.request, self.scheduler.tables.shape[1] * BLOCK_TOKENS)
        return self.truths[sequence]

    def run(self, plan: StepPlan) -> list[int]:
        """Execute a plan; returns the sampled tokens."""
        check_shape(plan)
        slots = plan.slots[: plan.num_decode].tolist() + [chunk.slot for chunk in plan.chunks]
        starts = plan.positions[: plan.num_decode].tolist() + [chunk.start for chunk in plan.chunks]
        ids = [[self.newest[slot]] for slot in slots[: plan.num_decode]]
        for c in plan.chunks:
            ids.append(plan.prefill_ids[c.first - plan.num_decode : c.first - plan.num_decode + c.count].tolist())
        truths = [self.truth(self.scheduler.running(slot)) for slot in slots]
        for truth, start, some in zip(truths, starts, ids, strict=True):
            assert some == truth.tokens[start : start + len(some)]
        self.check(truths, slots, starts)  # all before the step's tokens was cached by earlier steps
        for slot, start, some in zip(slots, starts, ids, strict=True):
            value = int(self.cells[self.at(slot, start - 1)]) if start else 0
            for position, token in enumerate(some, start):
                value = content(value, token)
                self.cells[self.at(slot, position)] = value
        self.check(truths, slots, [start + len(some) for start, some in zip(starts, ids, strict=True)])
        return self.sample(plan)

    def sample(self, plan: StepPlan) -> list[int]:
        tokens = []
        for place, slot, sequence in zip(plan.sample_at.tolist(), plan.sample_slots.tolist(), plan.sequences,
                                         strict=True):
            source, position = int(plan.slots[place]), int(plan.positions[place])
            truth = self.truth(sequence)
            assert position + 1 == len(truth.tokens), "sampled behind its newest token"
            tokens.append(draw(int(self.cells[self.at(source, position)]), sequence.request.index))
            truth.append(tokens[-1])
            self.newest[slot] = tokens[-1]
        for source, destination in plan.copies:
            self.cells[destination] = self.cells[source]
        return tokens

    def check(self, truths: list[Truth], slots: list[int], counts: list[int]) -> None:
        """The first positions of each slot, `counts` many, hold what they must."""
        have = self.cells[self.scheduler.tables[slots]].reshape(len(slots), -1)
        must = np.stack([truth.contents for truth in truths])
        assert ((have == must) | (np.arange(have.shape[1]) >= np.array(counts)[:, None])).all()

    def at(self, slot: int, position: int) -> tuple[int, int]:
        return int(self.scheduler.tables[slot, position // BLOCK_TOKENS]), position % BLOCK_TOKENS


def check_shape(plan: StepPlan) -> None:
    """Arrays as the record says, each slot once, chunks one after another and their positions in order."""
    assert plan.slots.dtype == plan.positions.dtype == plan.sample_slots.dtype == np.int32
    assert plan.prefill_ids.dtype == plan.sample_at.dtype == np.int64
    assert len(plan.slots) == len(plan.positions) == plan.num_decode + len(plan.prefill_ids) > 0
    assert len(plan.sample_at) == len(plan.sample_slots) == len(plan.sequences)
    assert plan.sample_at[: plan.num_decode].tolist() == list(range(plan.num_decode))
    first, slots = plan.num_decode, plan.slots[: plan.num_decode].tolist()
    for chunk in plan.chunks:
        assert chunk.first == first and chunk.count > 0 and chunk.start % BLOCK_TOKENS == 0
        tokens = slice(first, first + chunk.count)
        assert (plan.slots[tokens] == chunk.slot).all()
        assert (plan.positions[tokens] == np.arange(chunk.start, chunk.start + chunk.count)).all()
        first += chunk.count
        slots.append(chunk.slot)
    assert first == len(plan.slots) and len(set(slots)) == len(slots)
    assert len(set(plan.sample_slots.tolist())) == len(plan.sample_slots)


class Driver:
    """The engine's loop: groups in turn, and results that come `lag` plans of a group late."""

    def __init__(self, scheduler: Scheduler, num_groups: int = 1, lag: int = 0, stop_every: int = 0) -> None:
        self.scheduler, self.num_groups, self.lag, self.stop_every = scheduler, num_groups, lag, stop_every
        self.machine = Machine(scheduler)
        self.in_flight: deque[tuple[StepPlan, list[int]]] = deque()
        self.responses: dict[int, list[int]] = {}
        self.plans: list[StepPlan] = []
        self.tables: list[list] = []

    def run(self, most_plans: int = 10**9) -> None:
        """Until all is done or so many plans were made."""
        num_idle = 0
        while not self.scheduler.is_idle and len(self.plans) < most_plans:
            for group in range(self.num_groups):
                num_idle = 0 if self.turn(group) else num_idle + 1
                if num_idle and self.in_flight:
                    self.commit()
                    num_idle = 0
            assert num_idle <= self.num_groups, "nothing goes on"

    def turn(self, group: int) -> bool:
        """One plan of a group; whether there was one."""
        while sum(plan.group == group for plan, _ in self.in_flight) > self.lag:
            self.commit()
        plan = self.scheduler.plan(group)
        if len(self.plans) % 8 == 0:
            self.check_blocks()
        if plan is not None:
            self.plans.append(plan)
            self.tables.append(self.scheduler.tables[plan.slots].tolist())
            self.in_flight.append((plan, self.machine.run(plan)))
        return plan is not None

    def commit(self) -> None:
        plan, tokens = self.in_flight.popleft()
        done = [is_stop(token, self.stop_every) for token in tokens]
        for sequence in self.scheduler.commit(plan, tokens, done):
            assert sequence.request.index not in self.responses
            self.responses[sequence.request.index] = sequence.response

    def check_blocks(self) -> None:
        """Every block is used, kept or free, and those in use are those of the sequences that have a slot."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        assert pool.num_used + pool.num_kept + pool.num_free == pool.num_blocks
        slots = [slot for slot in range(len(scheduler.tables)) if scheduler.running(slot) is not None]
        assert len({block for slot in slots for block in scheduler.running(slot).blocks}) == pool.num_used
        assert len(slots) == scheduler.num_running == len(scheduler.tables) - scheduler.free_rows
