"""What one step computes, as arrays: the rows that decode, the chunks of prompts beside them, the samples wanted.

Owns the arrays and how they are kept from step to step. It never chooses what runs: the scheduler does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hybridflow.generation.blocks import BLOCK_TOKENS
from hybridflow.generation.runner import Chunk
from hybridflow.generation.sequence import Sequence, State


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One forward of one group. Its first `num_decode` tokens are the newest ones of rows, then come the chunks.

    Example: two rows decode, and a prompt of 3 tokens with two samples enters: `num_decode` 2, one chunk of 3, 5
    tokens, `sample_at` [0, 1, 4, 4].

    Attributes:
        chunks: in the order of their tokens.
        slots, positions: int32 `[tokens]`.
        prefill_ids: int64 `[tokens - num_decode]`. The newest tokens of decoding rows live on the device.
        sample_at: int64 `[samples]`, the tokens whose logits are wanted.
        sample_slots: int32 `[samples]`, whose newest token each sample becomes.
        sequences: of the samples.
        copies: (source, destination) of blocks to copy after the forward.
        group: whose step it is.
    """

    num_decode: int
    chunks: tuple[Chunk, ...]
    slots: np.ndarray
    positions: np.ndarray
    prefill_ids: np.ndarray
    sample_at: np.ndarray
    sample_slots: np.ndarray
    sequences: tuple[Sequence, ...]
    copies: tuple[tuple[int, int], ...]
    group: int


class DecodeRows:
    """The sequences of a group that are sampled in each of its steps, as arrays that change only where rows do.

    Attributes:
        slots: int32 `[rows]`.
        positions: int32 `[rows]`, of each row's newest token: what the next step computes.
        places: int64 `[rows]`, 0, 1, 2, ...
    """

    def __init__(self) -> None:
        self.sequences: tuple[Sequence, ...] = ()
        self.slots = np.empty(0, np.int32)
        self.positions = np.empty(0, np.int32)
        self.places = np.empty(0, np.int64)
        self._num_steps = 0
        # rows whose next block border comes after a number of steps of the same remainder
        self._growing: list[list[Sequence]] = [[] for _ in range(BLOCK_TOKENS)]
        self._ends = np.empty(0, np.int64)  # the number of steps after which each row has nothing left to sample
        self._first_end = -1

    def __len__(self) -> int:
        return len(self.sequences)

    def growing(self) -> list[Sequence]:
        """Rows whose newest token is the first of a block, which they do not have yet."""
        return self._growing[self._num_steps % BLOCK_TOKENS]

    def step(self) -> None:
        """One more sample of each row is planned. Those with nothing left to sample leave."""
        for sequence in self.sequences:
            sequence.cached += 1
        self.positions = self.positions + 1  # a new array: the plan keeps the old one
        self._num_steps += 1
        if self._num_steps == self._first_end:
            for place in np.flatnonzero(self._ends == self._num_steps).tolist():
                self.sequences[place].state = State.SAMPLED
            self.drop_others()

    def append(self, sequences: list[Sequence]) -> None:
        """Rows whose first sample was planned."""
        for sequence in sequences:
            self._border(sequence).append(sequence)
        self._set(self.sequences + tuple(sequences),
                  np.append(self.slots, np.array([s.slot for s in sequences], np.int32)),
                  np.append(self.positions, np.array([s.cached for s in sequences], np.int32)),
                  np.append(self._ends, np.array([self._num_steps + s.num_unplanned for s in sequences], np.int64)))

    def drop_others(self) -> None:
        """Sequences that are not DECODING any more leave."""
        stay = [sequence.state is State.DECODING for sequence in self.sequences]
        for sequence, stays in zip(self.sequences, stay, strict=True):
            if not stays:
                self._border(sequence).remove(sequence)
        sequences = tuple(sequence for sequence, stays in zip(self.sequences, stay, strict=True) if stays)
        self._set(sequences, self.slots[stay], self.positions[stay], self._ends[stay])

    def _border(self, sequence: Sequence) -> list[Sequence]:
        """Its row and those that reach a block border in the same steps: all rows go on by one position a step."""
        return self._growing[(self._num_steps - sequence.cached) % BLOCK_TOKENS]

    def _set(self, sequences: tuple[Sequence, ...], slots: np.ndarray, positions: np.ndarray, ends: np.ndarray) -> None:
        self.sequences, self.slots, self.positions, self._ends = sequences, slots, positions, ends
        self.places = np.arange(len(sequences))
        self._first_end = int(ends.min()) if len(sequences) else -1


@dataclass
class Prefill:
    """A prompt on its way into the cache, and the sequences that continue it: the first one computes it.

    Attributes:
        ids: int64 `[tokens]`.
    """

    sequences: list[Sequence]
    ids: np.ndarray

    @property
    def left(self) -> int:
        return len(self.ids) - self.sequences[0].cached


@dataclass
class StepDraft:
    """A step that takes every row of `rows`, to which chunks of prompts are added.

    Attributes:
        budget: prompt tokens that may still be added.
        prefills: what was added to.
        finished: of these, what is now in the cache up to its last token.
    """

    rows: DecodeRows
    budget: int
    prefills: list[Prefill] = field(default_factory=list)
    finished: list[Prefill] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    sample_at: list[int] = field(default_factory=list)

    def chunk_tokens(self, left: int) -> int:
        """How many of a prompt's last `left` tokens fit: all, or whole blocks; none or fewer if no block fits."""
        return left if left <= self.budget else self.budget // BLOCK_TOKENS * BLOCK_TOKENS

    def add(self, prefill: Prefill) -> None:
        """Compute as much of a prompt as the budget holds, which may be nothing."""
        owner, count = prefill.sequences[0], self.chunk_tokens(prefill.left)
        if count <= 0:
            return
        first = self.chunks[-1].first + self.chunks[-1].count if self.chunks else len(self.rows)
        self.chunks.append(Chunk(first, count, owner.slot, owner.cached))
        self.ids.append(prefill.ids[owner.cached : owner.cached + count])
        self.budget -= count
        owner.cached += count
        self.prefills.append(prefill)
        if prefill.left == 0:
            self.finished.append(prefill)
            self.sample_at += [first + count - 1] * len(prefill.sequences)

    def plan(self, group: int) -> StepPlan:
        """The arrays; to be asked before the rows step."""
        rows, chunks = self.rows, self.chunks
        if not chunks:
            return StepPlan(len(rows), (), rows.slots, rows.positions, np.empty(0, np.int64), rows.places, rows.slots,
                            rows.sequences, (), group)
        new = [sequence for prefill in self.finished for sequence in prefill.sequences]
        return StepPlan(
            len(rows), tuple(chunks),
            np.concatenate([rows.slots] + [np.full(chunk.count, chunk.slot, np.int32) for chunk in chunks]),
            np.concatenate([rows.positions] + [np.arange(c.start, c.start + c.count, dtype=np.int32) for c in chunks]),
            np.concatenate(self.ids), np.append(rows.places, np.array(self.sample_at, np.int64)),
            np.append(rows.slots, np.array([sequence.slot for sequence in new], np.int32)),
            rows.sequences + tuple(new), tuple(copy for prefill in self.finished for copy in _forks(prefill)), group)


def _forks(prefill: Prefill) -> list[tuple[int, int]]:
    """The block in which the prompt ends is copied for all but the first: each writes its own response into it."""
    if len(prefill.ids) % BLOCK_TOKENS == 0:
        return []
    last = len(prefill.ids) // BLOCK_TOKENS
    return [(prefill.sequences[0].blocks[last], sequence.blocks[last]) for sequence in prefill.sequences[1:]]
