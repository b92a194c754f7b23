"""Rows of files that are read, checked and tokenised as they are needed.

Owns the walk from a file's row to an item of a batch, for prompts and for pairs. In memory are the rows that wait in
the shuffle buffer, as they lie in the file, and nothing of the others but where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hybridflow.data.epoch_order import Visit
from hybridflow.data.lengths import LengthCounts, LengthRule
from hybridflow.data.loader import TokenisedPrompt, tokenise_prompts
from hybridflow.data.records import PromptRecord, prompt_text
from hybridflow.data.row_files import RowFiles, RowReader
from hybridflow.data.row_schema import parse_row
from hybridflow.data.row_source import Numbering, State
from hybridflow.data.sft import SftExample, sft_pairs, tokenise_pairs
from hybridflow.data.stream_order import StreamCursor
from hybridflow.data.tokenizer import Tokenizer

Item = TypeVar("Item")


@dataclass(frozen=True)
class Made(Generic[Item]):
    """What some rows became: an item for each, None where it is left out, and how many were cut."""

    items: list[Item | None]
    truncated: int


Make = Callable[[Sequence[PromptRecord], Sequence[int]], Made[Item]]  # of records and the ids of their rows


def prompt_maker(tokenizer: Tokenizer, rule: LengthRule, vocab_size: int | None) -> Make[TokenisedPrompt]:
    """Records to prompts. What it returns raises ValueError as PromptLoader does."""
    def make(records: Sequence[PromptRecord], ids: Sequence[int]) -> Made[TokenisedPrompt]:
        tokens = tokenise_prompts(records, tokenizer, vocab_size)
        fitted = [rule.prompt(row, record.origin) for row, record in zip(tokens, records)]
        items = [None if row is None else TokenisedPrompt(number, tuple(row), record)
                 for row, number, record in zip(fitted, ids, records)]
        return Made(items, sum(row is not None and len(row) < len(whole) for row, whole in zip(fitted, tokens)))
    return make


def pair_maker(tokenizer: Tokenizer, rule: LengthRule, vocab_size: int | None) -> Make[SftExample]:
    """Records to supervised examples. What it returns raises ValueError as SftLoader does."""
    def make(records: Sequence[PromptRecord], ids: Sequence[int]) -> Made[SftExample]:
        tokens = tokenise_pairs(sft_pairs(records), tokenizer, vocab_size)
        whole = list(zip(tokens.prompts, tokens.responses, strict=True))
        fitted = [rule.pair(*pair, record.origin) for pair, record in zip(whole, records)]
        items = [None if pair is None else SftExample(number, tuple(pair[0]), tuple(pair[1]))
                 for pair, number in zip(fitted, ids)]
        return Made(items, sum(pair is not None and sum(map(len, pair)) < sum(map(len, uncut))
                               for pair, uncut in zip(fitted, whole)))
    return make


class StreamedLoader(Generic[Item]):
    """An endless sequence of batches of exactly `per_step` items made of the rows of files (a `RowLoader`).

    Rows that are left out are passed over. The order depends on the files, the seed and the buffer alone.
    """

    def __init__(self, files: RowFiles, make: Make[Item], per_step: int, seed: int, shuffle: bool, buffer: int,
                 numbering: Numbering | None = None, held_out: Mapping[str, str] | None = None) -> None:
        """`held_out`: origins of prompts that must not be trained on, by their text.

        Raises ValueError for the first row of a file if it is bad; the others are looked at when they are met.
        """
        self.files, self.make, self.per_step = files, make, per_step
        self.numbering = numbering or Numbering(0, files.num_rows)
        self.held_out = {} if held_out is None else held_out
        self.cursor = StreamCursor(files.blocks, seed, shuffle, buffer)
        self.counts = LengthCounts()
        self._reader, self._raw, self._since_kept = RowReader(files), dict[int, Any](), 0
        for _, number, first in files.place_of_block:
            if number == 0:
                self._record(first, self._reader.raw(first))

    @property
    def num_rows(self) -> int:
        return self.files.num_rows

    @property
    def epoch(self) -> int:
        return self.cursor.epoch

    def __iter__(self) -> StreamedLoader[Item]:
        return self

    def __next__(self) -> tuple[Item, ...]:
        """The items of the next step."""
        return self.take(self.per_step)

    def take(self, count: int) -> tuple[Item, ...]:
        """The next `count` items.

        Raises:
            ValueError: a row is bad or is a held-out prompt (file, row and key are named), or two epochs of rows were
                too long.
        """
        items: list[Item] = []
        while len(items) < count:
            rows = [self._visit() for _ in range(count - len(items))]
            made = self.make([record for record, _ in rows],
                             [self.numbering.id(visit.epoch, visit.row) for _, visit in rows])
            kept = [item for item in made.items if item is not None]
            self.counts += LengthCounts(len(rows) - len(kept), made.truncated)
            self._since_kept = 0 if kept else self._since_kept + len(rows)
            if self._since_kept >= 2 * self.num_rows:  # a row may come first in one epoch and last in the next
                raise ValueError(f"all {self.num_rows} rows of {self.files.files[0].path} and the files beside it are "
                                 "too long; set data.max_prompt_length higher")
            items += kept
        return tuple(items)

    def state_dict(self) -> State:
        """{"seed", "epoch", "index", "dropped", "truncated"}: the position of the next row, and counts so far."""
        return {**self.cursor.state_dict(), "dropped": self.counts.dropped, "truncated": self.counts.truncated}

    def load_state_dict(self, state: State) -> None:
        """Continue from `state`; the rows that wait are read again."""
        self.cursor.load_state_dict(state)
        self.counts = LengthCounts(state["dropped"], state["truncated"])
        self._raw, self._since_kept = {}, 0

    def _visit(self) -> tuple[PromptRecord, Visit]:
        for row in self.cursor.arrivals():
            self._raw[row] = self._reader.raw(row)
        visit = self.cursor.take()
        return self._record(visit.row, self._raw.pop(visit.row)), visit

    def _record(self, row: int, raw: Any) -> PromptRecord:
        record = parse_row(*self._reader.parsed(raw, row))
        if (text := prompt_text(record.prompt)) in self.held_out:
            raise ValueError(f"{record.origin}: this training prompt is a held-out prompt too ({self.held_out[text]}); "
                             "remove it from one of the two files")
        return record
