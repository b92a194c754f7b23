"""Rows that say which answers are better: pairs, and single answers that are good or bad; and batches of them.

Owns tokenising them, their length limits, and the position in the data (as `PromptLoader` has it). Where such rows come
from is `preference_rows`' (files) and `preference_pairs`' (reasoning-gym tasks).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hybridflow.data.epoch_order import EpochCursor
from hybridflow.data.records import Prompt, PromptRecord, prompt_text
from hybridflow.data.token_rows import Overlong, TokenRows, check_ids, within_length
from hybridflow.data.tokenizer import Tokenizer

PROMPT_KEY, RESPONSE_KEY = "data.max_prompt_length", "generation.max_new_tokens"  # as messages name them


@dataclass(frozen=True)
class TextPreference:
    """One prompt with two answers, the first of which is better: by `margin`, 0 where the data does not say.

    Example: TextPreference("2 + 3 = ", "5", "6", origin="train.jsonl row 7")
    """

    prompt: Prompt
    chosen: str
    rejected: str
    margin: float = 0.0
    origin: str = "record"


@dataclass(frozen=True)
class TextLabel:
    """One answer that is good or not. Example: TextLabel("2 + 3 = ", "6", desirable=False)."""

    prompt: Prompt
    response: str
    desirable: bool
    origin: str = "record"


TextRow = TextPreference | TextLabel


@dataclass(frozen=True)
class PreferenceSplit:
    """Training and held-out rows; `prompts` are the held-out prompts, each once, with what judges an answer to them."""

    train: tuple[TextRow, ...]
    test: tuple[TextRow, ...]
    prompts: tuple[PromptRecord, ...]


@dataclass(frozen=True)
class PairExample:
    """A tokenised pair; both responses end with the end id. `row` is its place in the data, the same in every epoch.

    Example: PairExample(row=3, prompt_ids=(1, 52, 7), chosen_ids=(9, 2), rejected_ids=(8, 8, 2))
    """

    row: int
    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    margin: float = 0.0


@dataclass(frozen=True)
class LabelledExample:
    """A tokenised answer that is good or not, with the end id.

    Example: LabelledExample(row=3, prompt_ids=(1, 52, 7), response_ids=(9, 2), desirable=True)
    """

    row: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    desirable: bool


@dataclass(frozen=True)
class Limits:
    """What a row may be: tokens of a prompt, and of a response with its end id; and the size of the model's vocabulary.
    """

    prompt: int
    response: int
    overlong: Overlong
    vocab_size: int


class ExampleRows(Protocol):
    """Tokenised rows. `kept` are those within the limits, in order."""

    kept: list[int]

    def __len__(self) -> int: ...

    def example(self, row: int) -> PairExample | LabelledExample: ...


class PairRows:
    """Pairs. Prompt and responses are tokenised apart, so that the boundary is the one that generation meets.

    Raises ValueError for ids outside the vocabulary, and for rows that are too long where the policy is ERROR.
    """

    def __init__(self, pairs: Sequence[TextPreference], tokenizer: Tokenizer, limits: Limits) -> None:
        origins = [pair.origin for pair in pairs]
        self.prompts = TokenRows(tokenizer.encode_prompts([pair.prompt for pair in pairs]))
        self.chosen = _responses([pair.chosen for pair in pairs], tokenizer)
        self.rejected = _responses([pair.rejected for pair in pairs], tokenizer)
        self.margins = [pair.margin for pair in pairs]
        self.kept = _within(self.prompts, (self.chosen, self.rejected), origins, limits)

    def __len__(self) -> int:
        return len(self.prompts)

    def example(self, row: int) -> PairExample:
        return PairExample(row, self.prompts[row], self.chosen[row], self.rejected[row], self.margins[row])


class LabelRows:
    """Single answers, tokenised and limited as `PairRows` are."""

    def __init__(self, labels: Sequence[TextLabel], tokenizer: Tokenizer, limits: Limits) -> None:
        origins = [label.origin for label in labels]
        self.prompts = TokenRows(tokenizer.encode_prompts([label.prompt for label in labels]))
        self.responses = _responses([label.response for label in labels], tokenizer)
        self.desirable = [label.desirable for label in labels]
        self.kept = _within(self.prompts, (self.responses,), origins, limits)

    def __len__(self) -> int:
        return len(self.prompts)

    def example(self, row: int) -> LabelledExample:
        return LabelledExample(row, self.prompts[row], self.responses[row], self.desirable[row])


def _responses(texts: Sequence[str], tokenizer: Tokenizer) -> TokenRows:
    return TokenRows([[*tokenizer.encode(text), tokenizer.eos_id] for text in texts])


def _within(prompts: TokenRows, responses: Sequence[TokenRows], origins: Sequence[str], limits: Limits) -> list[int]:
    for rows in (prompts, *responses):
        check_ids(rows, origins, limits.vocab_size)
    kept = set(within_length(prompts, origins, limits.prompt, limits.overlong, PROMPT_KEY))
    for rows in responses:
        kept &= set(within_length(rows, origins, limits.response, limits.overlong, RESPONSE_KEY))
    if not kept:
        raise ValueError(f"no row has both a prompt within {PROMPT_KEY} = {limits.prompt} tokens and responses within "
                         f"{RESPONSE_KEY} = {limits.response}; raise one of them")
    return sorted(kept)


Example = TypeVar("Example", PairExample, LabelledExample)


class PreferenceLoader(Generic[Example]):
    """An endless sequence of batches of `examples_per_step` examples each, ordered as PromptLoader orders prompts."""

    def __init__(self, rows: ExampleRows, examples_per_step: int, seed: int, shuffle: bool = True) -> None:
        """Raises ValueError for examples_per_step below 1."""
        if examples_per_step < 1:
            raise ValueError(f"examples_per_step is {examples_per_step}; it must be at least 1")
        self.rows, self.examples_per_step = rows, examples_per_step
        self.cursor = EpochCursor(len(rows.kept), seed, shuffle)

    @property
    def num_dropped(self) -> int:
        """Rows left out because they are too long."""
        return len(self.rows) - len(self.rows.kept)

    def __iter__(self) -> PreferenceLoader[Example]:
        return self

    def __next__(self) -> tuple[Example, ...]:
        """The examples of the next step."""
        return tuple(self.rows.example(self.rows.kept[visit.row]) for visit in self.cursor.take(self.examples_per_step))

    def state_dict(self) -> dict[str, int]:
        """{"epoch", "index"} of the next example."""
        return self.cursor.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state`."""
        self.cursor.load_state_dict(state)


def as_labels(rows: Sequence[TextRow]) -> tuple[TextLabel, ...]:
    """Labelled answers, each pair as a good one and a bad one."""
    labels: list[TextLabel] = []
    for row in rows:
        if isinstance(row, TextLabel):
            labels.append(row)
        else:
            labels += [TextLabel(row.prompt, row.chosen, True, f"{row.origin} (chosen)"),
                       TextLabel(row.prompt, row.rejected, False, f"{row.origin} (rejected)")]
    return tuple(labels)


def preference_fingerprint(rows: Sequence[TextRow]) -> int:
    """63 bits that are equal on two ranks only if they hold the same rows in the same order."""
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        told = ([row.chosen, row.rejected, row.margin] if isinstance(row, TextPreference)
                else [row.response, row.desirable])
        digest.update(json.dumps([prompt_text(row.prompt), *told]).encode())
    return int.from_bytes(digest.digest(), "big") >> 1
