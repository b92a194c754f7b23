"""Decides what each step of generation computes: who enters, who decodes, who has to give its blocks back.

Owns the rows, the block tables and the waiting line of one replica. It holds no tensors and no token that it needs for
a decision, so a step can be planned before the tokens of the last one are known. Every decision follows from the calls
made so far: ranks that make the same calls plan the same steps. What is decided here changes speed and memory, never a
token.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from hybridflow.generation.blocks import BLOCK_TOKENS, BlockPool
from hybridflow.generation.prefix_cache import ROOT, PrefixCache
from hybridflow.generation.sequence import Request, Sequence, State
from hybridflow.generation.step_plan import DecodeRows, Prefill, StepDraft, StepPlan
from hybridflow.generation.waiting_line import Load, WaitingLine, next_group
from hybridflow.parallel.arithmetic import ceil_div


@dataclass
class SchedulerStats:
    """Counts since the scheduler was made.

    Attributes:
        steps: planned.
        preempted: times that a running sequence had to give its blocks back.
        prefix_hit_tokens: of prompts, found in the prefix cache. Siblings of one prefill are not counted.
        prefill_tokens: of prompts, computed.
        decode_tokens: computed by decoding rows.
        peak_blocks: in use at once.
    """

    steps: int = 0
    preempted: int = 0
    prefix_hit_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    peak_blocks: int = 0


@dataclass
class _Group:
    """Sequences whose steps are the same; a pipeline works on several groups in turn."""

    index: int
    rows: DecodeRows = field(default_factory=DecodeRows)
    prefills: list[Prefill] = field(default_factory=list)
    in_flight: list[StepPlan] = field(default_factory=list)
    starved: bool = False  # it waits for blocks that only steps in flight can give back

    def load(self) -> Load:
        """Of what it goes on with; sequences whose last sample is planned are as good as gone."""
        load = Load(len(self.rows), int(self.rows.positions.sum()))
        for prefill in self.prefills:
            load.add(prefill.sequences)
        return load


class Scheduler:
    """Continuous batching over a paged cache.

    The engine adds requests, asks a group for its next plan, executes it, and commits the sampled tokens. Plans are
    executed in the order in which they were made, by every stage, each before the next `plan` call overwrites
    `tables`; later plans build on what earlier ones write. So a plan that was not executed, because something failed,
    leaves `stop` and `drop_cache` as the only way on.

    Attributes:
        tables: int32 `[max_rows, width]`, the blocks of each slot; entries that no planned token needs hold anything.
        pool: the blocks, to be looked at only.
        stats: counts.
    """

    def __init__(self, *, num_blocks: int, max_rows: int, max_step_tokens: int, num_groups: int = 1,
                 max_length: int) -> None:
        """
        Args:
            num_blocks: of 16 tokens.
            max_rows: sequences that have a slot at once, over all groups.
            max_step_tokens: of a step, decoding rows first; prompts get what is left.
            num_groups: groups of sequences whose steps are in flight at the same time.
            max_length: of a sequence, prompt and response.
        """
        self.tables = np.zeros((max_rows, ceil_div(max_length, BLOCK_TOKENS)), np.int32)
        self.stats = SchedulerStats()
        self._max_rows = max_rows
        self._max_step_tokens = max_step_tokens
        self._cache = PrefixCache()
        self.pool = BlockPool(num_blocks, self._cache)
        self._line = WaitingLine()
        self._groups = [_Group(index) for index in range(num_groups)]
        self._free_slots = list(range(max_rows - 1, -1, -1))
        self._running: dict[int, Sequence] = {}  # by slot
        self._num_added = 0
        self._blocked = -1  # serial of the waiting sequence that lacks blocks, until some are given back

    @property
    def free_rows(self) -> int:
        return len(self._free_slots)

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return len(self._running)

    @property
    def wanted_rows(self) -> int:
        """How many more requests it could give a row to now, as far as it knows: 0 while the line lacks blocks."""
        if self._line and self._line[0].serial == self._blocked:
            return 0
        return max(0, len(self._free_slots) - len(self._line))

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        return not (self._line or self._running or any(group.in_flight for group in self._groups))

    def running(self, slot: int) -> Sequence | None:
        """The sequence that has a slot; None: it is free."""
        return self._running.get(slot)

    @property
    def used_blocks(self) -> int:
        return self.pool.num_used

    def add(self, requests: Many[Request]) -> None:
        """To the end of the waiting line. Equal prompts that stand side by side are computed once.

        Raises:
            ValueError: a request can never fit into the cache. None is added then.
        """
        self.require_fitting(requests)
        for request in requests:
            self._line.add(Sequence(request, self._num_added))
            self._num_added += 1

    def require_fitting(self, requests: Many[Request]) -> None:
        """
        Raises:
            ValueError: a request can never fit into the cache.
        """
        for request in requests:
            length = len(request.ids) + len(request.begun) + request.max_new_tokens
            assert request.ids and request.max_new_tokens >= 1, f"request {request.index}: nothing to do"
            assert ceil_div(length, BLOCK_TOKENS) <= self.tables.shape[1], f"request {request.index}: above max_length"
            needed = ceil_div(length - 1, BLOCK_TOKENS)  # the last token is never fed back
            if needed > self.pool.num_blocks:
                raise ValueError(
                    f"generation.kv_cache_mb: the cache has {self.pool.num_blocks} blocks of {BLOCK_TOKENS} tokens, "
                    f"but request {request.index} (prompt {len(request.ids) + len(request.begun)}, max_new_tokens "
                    f"{request.max_new_tokens}) needs {needed} of them alone: make generation.kv_cache_mb at least "
                    f"{needed / self.pool.num_blocks:.2f} times as large")

    def plan(self, group: int = 0) -> StepPlan | None:
        """What `group` runs next. None: nothing, until a plan is committed or another group has run."""
        own = self._groups[group]
        own.starved = not self._grow(own)
        if own.starved:
            return None
        rows = own.rows
        budget = self._max_step_tokens - len(rows)
        draft = StepDraft(rows, budget if len(rows) else max(budget, BLOCK_TOKENS))
        for prefill in own.prefills:
            draft.add(prefill)
        if len(draft.chunks) == len(own.prefills):  # else nobody passes a prompt that waits for the step's budget
            self._admit(own, draft)
        if not len(rows) and not draft.chunks:
            return None
        plan = draft.plan(group)
        self._count(plan, draft)
        rows.step()
        if draft.chunks:
            self._settle(own, draft)
        own.in_flight.append(plan)
        return plan

    def commit(self, plan: StepPlan, tokens: Many[int] | np.ndarray, done: Many[bool] | np.ndarray) -> list[Sequence]:
        """The results of a plan, in the order of `plan.sequences`; returns the sequences that end with them.

        Tokens of sequences that ended before are dropped, and so is all of a plan that was in flight when everything
        was stopped.

        Args:
            tokens: `[samples]`.
            done: `[samples]`, whether the token ends its sequence. One that has all it may have ends anyway.
        """
        group = self._groups[plan.group]
        if plan not in group.in_flight:
            return []
        group.in_flight.remove(plan)
        finished = []
        ended = State.ENDED
        for sequence, token, ends in zip(plan.sequences, np.asarray(tokens).tolist(), np.asarray(done).tolist(),
                                         strict=True):
            if sequence.state is ended:
                continue
            response = sequence.response
            response.append(token)
            if ends or len(response) == sequence.request.max_new_tokens:
                finished.append(sequence)
                sequence.state = ended  # now: the rest of a lagging plan is dropped
        for sequence in finished:
            self._give_back(sequence)
        if finished:
            group.rows.drop_others()
        return finished

    def drop_cache(self) -> None:
        """The weights changed: no content found before is found again, and what runs offers nothing more."""
        self.pool.drop_kept()
        self._blocked = -1
        for sequence in self._running.values():
            sequence.node = None

    def stop(self) -> list[Sequence]:
        """End all that runs and waits, with the tokens committed so far; oldest first. All blocks are unused after."""
        stopped = sorted([*self._running.values(), *self._line.clear()], key=lambda sequence: sequence.serial)
        for group in self._groups:
            self._groups[group.index] = _Group(group.index)
        for sequence in stopped:
            if sequence.slot >= 0:
                self._give_back(sequence)
            sequence.state = State.ENDED
        return stopped

    def _grow(self, group: _Group) -> bool:
        """A block for each row of `group` whose newest token is the first of one. Where there are too few, running
        sequences are preempted; False if steps in flight forbid it, and nothing was handed out."""
        while len(growing := group.rows.growing()) > self.pool.num_available:
            victim = self._victim()
            if victim is None:
                return False
            self._preempt(victim)
        for sequence in growing:
            block = self.pool.take()
            self.tables[sequence.slot, len(sequence.blocks)] = block
            sequence.blocks.append(block)
        return True

    def _victim(self) -> Sequence | None:
        """The youngest sequence of the groups not in flight, but never the oldest of all: that one always goes on, so
        something always ends."""
        oldest = min(self._running.values(), key=lambda sequence: sequence.serial)
        return max((sequence for sequence in self._running.values()
                    if sequence is not oldest and not self._groups[sequence.group].in_flight),
                   key=lambda sequence: sequence.serial, default=None)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the line, to be computed again with the tokens it has."""
        group, state = self._groups[sequence.group], sequence.state
        assert sequence.outstanding == 0, "only sequences of groups not in flight are preempted"
        self._give_back(sequence)
        sequence.state = State.WAITING
        if state is State.DECODING:
            group.rows.drop_others()
        else:
            for prefill in group.prefills:
                prefill.sequences = [member for member in prefill.sequences if member is not sequence]
            group.prefills = [prefill for prefill in group.prefills if prefill.sequences]
        sequence.prompt = sequence.tokens
        sequence.cached = sequence.num_registered = 0
        sequence.node = ROOT
        self._line.add(sequence)
        self.stats.preempted += 1

    def _give_back(self, sequence: Sequence) -> None:
        """Its slot and blocks; what is full of known tokens can be found in the prefix cache from now on."""
        if sequence.cached >= (sequence.num_registered + 1) * BLOCK_TOKENS:
            self._register(sequence, sequence.tokens)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        self._free_slots.append(sequence.slot)
        del self._running[sequence.slot]
        sequence.slot = -1
        self._blocked = -1

    def _register(self, sequence: Sequence, tokens: tuple[int, ...]) -> None:
        """Let the prefix cache know the blocks that are full of `tokens`, the first ones of the sequence."""
        node = sequence.node
        if node is None:
            return
        for i in range(sequence.num_registered, min(sequence.cached, len(tokens)) // BLOCK_TOKENS):
            node = self._cache.register(node, tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS], sequence.blocks[i])
            sequence.num_registered = i + 1
            self._blocked = -1
        sequence.node = node

    def _admit(self, own: _Group, draft: StepDraft) -> None:
        """Give rows to waiting sequences, in their order, while rows, blocks and the budget of the step last.

        Those that belong to a group with less work are left to it, but nobody passes one that lacks blocks.
        """
        if (not self._line or not self._free_slots or self._line[0].serial == self._blocked
                or any(group.starved for group in self._groups)):
            return
        loads = [group.load() for group in self._groups]
        all_rows = min(self._max_rows, sum(load.rows for load in loads) + len(self._line))
        most_rows = ceil_div(all_rows, len(self._groups))
        place, rows_left = 0, len(self._free_slots)
        while place < len(self._line) and rows_left and draft.budget > 0 and self._line[place].serial != self._blocked:
            target = next_group(loads, most_rows, own.index)
            if target is None:
                return
            some = self._line.siblings(place, min(rows_left, most_rows - loads[target].rows))
            if target == own.index:
                some = self._start(some, own, draft)
                if not some:
                    return
                self._line.remove(place, len(some))
            else:
                place += len(some)
            loads[target].add(some)
            rows_left -= len(some)

    def _start(self, siblings: list[Sequence], group: _Group, draft: StepDraft) -> list[Sequence]:
        """Begin the prefill of as many of `siblings` as there are blocks for; returns them."""
        prompt = siblings[0].prompt
        hits, node = self._find(prompt)
        start = len(hits) * BLOCK_TOKENS
        if draft.chunk_tokens(len(prompt) - start) <= 0:
            return []
        num_full = len(prompt) // BLOCK_TOKENS
        forks = ceil_div(len(prompt), BLOCK_TOKENS) - num_full  # of each sibling: the block in which the prompt ends
        # One block to grow by for each row beside the first: else it would soon be preempted again. Simulated with
        # responses of 200 to 800 tokens in too few blocks: keeping more saves recomputation and loses as much in rows.
        room = (self.pool.num_available - sum(self.pool.is_kept(block) for block in hits) - (num_full - len(hits))
                - len(self._running))
        count = min(len(siblings), (room + 1) // (forks + 1))
        if count < 1:
            self._blocked = siblings[0].serial
            return []
        siblings = siblings[:count]
        self.pool.share(hits)
        full = hits + [self.pool.take() for _ in range(num_full - len(hits))]
        for sequence in siblings:
            if sequence is not siblings[0]:
                self.pool.share(full)
            self._seat(sequence, full + [self.pool.take() for _ in range(forks)], group)
        siblings[0].cached, siblings[0].num_registered, siblings[0].node = start, len(hits), node
        self.stats.prefix_hit_tokens += start
        prefill = Prefill(siblings, np.array(prompt, np.int64))
        group.prefills.append(prefill)
        draft.add(prefill)
        return siblings

    def _find(self, prompt: tuple[int, ...]) -> tuple[list[int], int]:
        """The cached blocks that a prompt begins with, and their last node. Its last token is always computed."""
        blocks: list[int] = []
        node = ROOT
        for first in range(0, (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            found = self._cache.find(node, prompt[first : first + BLOCK_TOKENS])
            if found is None:
                break
            node, block = found
            blocks.append(block)
        return blocks, node

    def _seat(self, sequence: Sequence, blocks: list[int], group: _Group) -> None:
        sequence.slot = self._free_slots.pop()
        sequence.group = group.index
        sequence.state = State.PREFILLING
        sequence.blocks = blocks
        self._running[sequence.slot] = sequence
        self.tables[sequence.slot, : len(blocks)] = blocks

    def _settle(self, group: _Group, draft: StepDraft) -> None:
        """What the chunks of a plan change: later plans find their blocks, and finished prompts decode."""
        for prefill in draft.prefills:
            self._register(prefill.sequences[0], prefill.sequences[0].prompt)
        entering = []
        for prefill in draft.finished:
            first = prefill.sequences[0]
            for sequence in prefill.sequences:
                sequence.cached = len(prefill.ids)
                sequence.num_registered, sequence.node = first.num_registered, first.node
                sequence.state = State.DECODING
                if sequence.num_unplanned:
                    entering.append(sequence)
                else:
                    sequence.state = State.SAMPLED
        group.prefills = [prefill for prefill in group.prefills if prefill.left]
        if entering:
            group.rows.append(entering)

    def _count(self, plan: StepPlan, draft: StepDraft) -> None:
        self.stats.steps += 1
        self.stats.decode_tokens += plan.num_decode
        self.stats.prefill_tokens += sum(chunk.count for chunk in draft.chunks)
        self.stats.peak_blocks = max(self.stats.peak_blocks, self.pool.num_used)
