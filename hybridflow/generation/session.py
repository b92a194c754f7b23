"""One call of generation: the turns of its groups, from the waiting line to completions.

Owns the loop of plan, run, sample and commit. What runs in a step is the scheduler's, how it is computed the runner's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridflow.generation.blocks import BLOCK_TOKENS
from hybridflow.generation.exchange import Choices, Chosen, Exchange, News
from hybridflow.generation.intake import Intake
from hybridflow.generation.random import stream_keys, uniforms
from hybridflow.generation.records import Begun, Completion, FinishReason, OnEnd, Prompt, SamplingParams
from hybridflow.generation.results import Results, Sampled
from hybridflow.generation.runner import StageRunner, StepBatch
from hybridflow.generation.sampling import Choice, Sampler
from hybridflow.generation.scheduler import Scheduler
from hybridflow.generation.seen_tokens import SeenTokens
from hybridflow.generation.sequence import Request
from hybridflow.generation.sequence import Sequence as Running
from hybridflow.generation.step_plan import StepPlan
from hybridflow.generation.stop_strings import StopStrings
from hybridflow.generation.work_source import WorkSource

NOTHING = Begun((), (), None, ())
DRAWS_AHEAD = 32


@dataclass(frozen=True)
class Turn:
    """A step whose choices are not committed yet."""

    plan: StepPlan | None  # None where the group had nothing to run, and prompts may still come
    choices: Choices


class Session:
    """What waits, what runs and what has been sampled in one `generate` call."""

    def __init__(self, runner: StageRunner, scheduler: Scheduler, exchange: Exchange, prompts: Sequence[Prompt],
                 params: SamplingParams, seed: int, version: int, vocab_size: int,
                 decode: Callable[[Sequence[int]], str] | None, source: WorkSource | None,
                 ended: OnEnd | None = None) -> None:
        """
        Args:
            source: hands out the prompts of this replica; None: it has them all.
            ended: is told of every response that has ended.
        """
        self.on_end = ended
        self.runner, self.scheduler, self.exchange = runner, scheduler, exchange
        self.intake = None if source is None else Intake(source, scheduler)
        self.prompts, self.params, self.version = prompts, params, version
        self.sampler = Sampler(params, vocab_size)
        self.rows = tuple(RowState(scheduler.tables.shape[0], exchange.device) for _ in range(exchange.num_groups))
        self.seen: SeenTokens | None = None
        if params.repetition_penalty != 1 and exchange.leads_sampling:
            self.seen = SeenTokens(scheduler.tables.shape[0], vocab_size, exchange.device)
        self.results = Results(len(prompts))
        self.ended = np.zeros(len(prompts), dtype=bool)
        self.stopped = np.zeros(len(prompts), dtype=bool)
        self.is_stop = np.zeros(vocab_size, dtype=bool)
        self.is_stop[list(params.stop_ids)] = True
        self.text_ends = StopStrings(params.stop_strings, decode) if params.stop_strings else None
        ids = np.array([(p.id, p.sample) for p in prompts], dtype=np.int64).reshape(-1, 2)
        self.keys = stream_keys(seed, ids[:, 0], ids[:, 1])  # [requests]
        self.in_flight: tuple[deque[Turn], ...] = tuple(deque() for _ in range(exchange.num_groups))

    def run(self, interrupt: Callable[[], bool] | None) -> list[Completion]:
        """Turns of the groups, one after another, until nothing is left. What happens between two turns, and in which
        order, is the same on every rank of the replica.
        """
        if self.intake is None:
            self.scheduler.add([self.request(i) for i in self.longest_first()])
        else:  # later than before the first message is too late: the others would wait for the next one
            self.scheduler.require_fitting([self.request(i) for i in range(len(self.prompts))])
        group = 0
        while self.may_come or not self.scheduler.is_idle or any(self.in_flight):
            if self.turn(group, interrupt):
                break
            group = (group + 1) % len(self.in_flight)
        self.drain(group)
        return self.completions()

    @property
    def may_come(self) -> bool:
        """Whether there may be prompts that this replica has not heard of."""
        return self.intake is not None and self.intake.more

    def longest_first(self) -> list[int]:
        """So that a lack of memory shows at the start; equal prompts side by side."""
        return sorted(range(len(self.prompts)), key=lambda i: (-len(self.prompts[i].ids), self.prompts[i].ids, i))

    def request(self, index: int) -> Request:
        prompt = self.prompts[index]
        begun = (prompt.begun or NOTHING).response_ids
        return Request(index, prompt.ids, prompt.longest(self.params) - len(begun), begun)

    def turn(self, group: int, interrupt: Callable[[], bool] | None) -> bool:
        """One step of a group, once the choices of its step before are in. Returns whether all shall stop."""
        waiting = self.in_flight[group]
        if waiting and waiting[-1].plan is not None and self.exchange.is_first:
            self.rows[group].heard(waiting[-1].plan, waiting[-1].choices)
        while len(waiting) > self.exchange.lag:
            if self.collect(waiting.popleft()):
                return True
        plan = self.scheduler.plan(group)
        if plan is None and not self.may_come:
            return bool(waiting) and self.collect(waiting.popleft())
        waiting.append(Turn(plan, self.step(plan, interrupt)))
        return False

    def step(self, plan: StepPlan | None, interrupt: Callable[[], bool] | None) -> Choices:
        """Run a plan on this stage and let the last one choose."""
        choice, samples = None, 0
        if plan is not None:
            choice, samples = self.forward(plan), len(plan.sequences)
        news = self.news(interrupt) if self.exchange.leads_sampling else News()
        return self.exchange.share(choice, samples, news, self.may_come)

    def forward(self, plan: StepPlan) -> Choice | None:
        """The leader's choice."""
        rows = self.rows[plan.group]
        rows.enter(plan, self.keys)
        batch = rows.batch(plan, self.scheduler.tables)
        if self.runner.drawer is not None and self.params.draws_raw:
            draws, _ = rows.draws(plan)
            tokens, log_probs = self.runner.drawer.run_and_draw(batch, draws, self.params.temperature)
            self.runner.copy_blocks(plan.copies)
            return Choice(tokens, log_probs, None)
        hidden = self.runner.run(batch, self.exchange.receive_hidden(len(plan.slots)))
        self.runner.copy_blocks(plan.copies)
        if not self.exchange.is_last:
            self.exchange.send_hidden(hidden)
            return None
        if not plan.sequences:  # no prompt ends in this step
            return None
        logits = self.runner.logits(hidden)  # its gather is collective
        return self.choose(plan, logits) if self.exchange.leads_sampling else None

    def news(self, interrupt: Callable[[], bool] | None) -> News:
        """What the leader says beside its choice. It tells of new prompts with a step, so that all stages begin them at
        the same place in the order of things.
        """
        return News(interrupt is not None and interrupt(), None if self.intake is None else self.intake.ask())

    def drain(self, group: int) -> None:
        """Hear the end of what is under way behind a turn of `group`: its messages are sent."""
        while any(self.in_flight):
            group = (group + 1) % len(self.in_flight)
            if self.in_flight[group]:
                self.collect(self.in_flight[group].popleft())
        self.exchange.finish()

    def choose(self, plan: StepPlan, logits: Tensor) -> Choice:
        rows = self.rows[plan.group]
        draws, counts = rows.draws(plan)
        if self.seen is None:
            return self.sampler.choose(logits, draws, counts)
        for slot, sequence in entering(plan):
            self.seen.begin(slot, sequence.tokens)
        choice = self.sampler.choose(logits, draws, counts, self.seen.of(rows.sample_slots))
        self.seen.add(rows.sample_slots, choice.tokens)
        return choice

    def collect(self, turn: Turn) -> bool:
        """Commit a step's choices. Returns whether all shall stop."""
        chosen = turn.choices.on_host()
        if turn.plan is not None:
            self.commit(turn.plan, chosen)
        if self.intake is not None:
            self.scheduler.add([self.request(i) for i in self.intake.hear(chosen.news.taken)])
        return chosen.news.stop

    def commit(self, plan: StepPlan, chosen: Chosen) -> None:
        requests, done = self.rows[plan.group].requests(plan), self.is_stop[chosen.tokens]
        if self.text_ends is not None:
            done |= self.completes_a_string(plan.sequences, chosen.tokens)
        self.note(requests, chosen)
        ended = self.scheduler.commit(plan, chosen.tokens, done)
        for sequence in ended:
            self.ended[sequence.request.index] = True
            if self.on_end is not None:
                self.on_end(sequence.request.index, (*sequence.request.begun, *sequence.response))
        if ended:
            self.stopped[requests[done]] = True

    def note(self, requests: np.ndarray, chosen: Chosen) -> None:
        columns = requests, chosen.tokens, chosen.log_probs, chosen.processed
        if self.exchange.lag:  # behind a lagging host, a sequence may have run a step past its end
            fresh = ~self.ended[requests]
            columns = [None if column is None else column[fresh] for column in columns]
        self.results.add(*columns)

    def completes_a_string(self, sequences: Sequence[Running], tokens: np.ndarray) -> np.ndarray:
        responses = ([*s.request.begun, *s.response, int(token)] for s, token in zip(sequences, tokens, strict=True))
        return np.array([len(ids) >= self.params.min_new_tokens and self.text_ends.ends(ids) for ids in responses])

    def completions(self) -> list[Completion]:
        self.scheduler.stop()
        rows = [*zip(self.prompts, self.results.by_request(), self.ended, self.stopped, strict=True)]
        mine = range(len(rows)) if self.intake is None else self.intake.taken
        return [self.completion(*rows[i]) for i in mine]

    def completion(self, prompt: Prompt, new: Sampled, ended: bool, stopped: bool) -> Completion:
        begun = prompt.begun or NOTHING
        ids, log_probs = new.ids.tolist(), new.log_probs.tolist()
        _check_numbers(prompt, log_probs, len(begun.response_ids))
        _check_numbers(prompt, [] if new.processed is None else new.processed.tolist(), len(begun.response_ids))
        reason = FinishReason.INTERRUPTED
        if ended:
            reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        processed = None
        if new.processed is not None or begun.processed_log_probs is not None:
            processed = (*(begun.processed_log_probs or begun.log_probs),
                         *(log_probs if new.processed is None else new.processed.tolist()))
        return Completion(prompt.id, prompt.sample, prompt.ids, (*begun.response_ids, *ids),
                          (*begun.log_probs, *log_probs), reason, processed,
                          (*begun.versions, *[self.version] * len(ids)))


class RowState:
    """What each slot needs beside its blocks: its newest token, its random stream, how many tokens it has drawn.

    While the same rows decode, a step costs a few array operations: what depends on the rows alone is kept.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device = device
        self._newest = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._keys, self._counts = np.zeros(max_rows, dtype=np.uint64), np.zeros(max_rows, dtype=np.int64)
        self._of: tuple[Running, ...] | None = None  # whose slots, places and draws are kept
        self._slots, self._sample_slots, self._sample_at = (torch.empty(0) for _ in range(3))
        self._ahead = np.empty((0, 0))  # [draws, samples]
        self._drawn = 0
        self._requests_of: tuple[Running, ...] | None = None
        self._requests = np.empty(0, dtype=np.int64)

    def enter(self, plan: StepPlan, keys: np.ndarray) -> None:
        """Begin a step. Sequences that leave their prefill in it begin to draw where their responses are. `keys`: one
        per request.
        """
        for slot, sequence in entering(plan):
            self._keys[slot] = keys[sequence.request.index]
            self._counts[slot] = len(sequence.request.begun) + len(sequence.response)
        if plan.chunks or plan.sequences is not self._of:
            self._slots, self._sample_at = self._to(plan.slots), self._to(plan.sample_at)
            self._sample_slots = self._to(plan.sample_slots).long()
            self._of, self._ahead, self._drawn = None if plan.chunks else plan.sequences, np.empty((0, 0)), 0

    def batch(self, plan: StepPlan, tables: np.ndarray) -> StepBatch:
        """The step on the device. On a CPU nothing is copied."""
        width = int(plan.positions.max()) // BLOCK_TOKENS + 1
        ids = self._newest.index_select(0, self._slots[: plan.num_decode])
        if plan.chunks:
            ids = torch.cat([ids, self._to(plan.prefill_ids)])
        return StepBatch(plan.num_decode, plan.chunks, ids, self._to(plan.positions), self._slots,
                         self._to(tables[:, :width]), self._sample_at)

    def draws(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Of each sample `[samples]`: its uniform, fp64, and which of its draws that is, int64. To be asked once a
        step. Rows that go on draw ahead: 32 draws of 64 rows take 3 times as long as one.
        """
        slots = plan.sample_slots
        counts = self._counts[slots]
        if self._drawn == len(self._ahead):
            ahead = 1 if plan.chunks else DRAWS_AHEAD
            self._ahead, self._drawn = uniforms(self._keys[slots], counts + np.arange(ahead)[:, None]), 0
        self._counts[slots] = counts + 1
        self._drawn += 1
        return self._to(self._ahead[self._drawn - 1]), self._to(counts)

    @property
    def sample_slots(self) -> Tensor:
        """int64 `[samples]`, of the step that was entered last."""
        return self._sample_slots

    def heard(self, plan: StepPlan, choices: Choices) -> None:
        """The choices of a step are what the rows go on with."""
        known = plan.sequences is self._of
        slots = self._sample_slots if known else self._to(plan.sample_slots).long()
        self._newest.index_copy_(0, slots, choices.tokens)

    def requests(self, plan: StepPlan) -> np.ndarray:
        """int64 `[samples]`: which request each sample is of."""
        if plan.sequences is not self._requests_of:
            self._requests_of = plan.sequences
            self._requests = np.array([sequence.request.index for sequence in plan.sequences], dtype=np.int64)
        return self._requests

    def _to(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)


def entering(plan: StepPlan) -> Iterator[tuple[int, Running]]:
    """Slots and sequences whose prompt is in the cache from this step on."""
    first = plan.num_decode
    return zip(plan.sample_slots[first:].tolist(), plan.sequences[first:], strict=True)


def _check_numbers(prompt: Prompt, log_probs: list[float], begun: int) -> None:
    if not all(value == value for value in log_probs):
        place = begun + next(i for i, value in enumerate(log_probs) if value != value)
        raise FloatingPointError(f"prompt id {prompt.id}, sample {prompt.sample}: the log-prob of response token "
                                 f"{place} is NaN: the model's logits are not finite; check its weights and the "
                                 "learning rate")
