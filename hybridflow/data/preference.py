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
from hybridflow.data.lengths import LengthCounts, LengthRule
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
    """Training and held-out rows; `prompts` are the held-out prompts, each once, with what judges an answer to them.
    `num_equal` training pairs had two equal answers and were left out.
    """

    train: tuple[TextRow, ...]
    test: tuple[TextRow, ...]
    prompts: tuple[PromptRecord, ...]
    num_equal: int = 0

    def sentence(self) -> str | None:
        """What to tell at the start of a run, None where no pair was left out."""
        if not self.num_equal:
            return None
        are = "pair of equal answers says nothing and was" if self.num_equal == 1 else (
            "pairs of equal answers say nothing and were")
        return f"{self.num_equal} training {are} left out."


@dataclass(frozen=True)
class PairExample:
    """A tokenised pair; responses end with the end id, but those that were cut. `row` is its place in the data, the
    same in every epoch.

    Example: PairExample(row=3, prompt_ids=(1, 52, 7), chosen_ids=(9, 2), rejected_ids=(8, 8, 2))
    """

    row: int
    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    margin: float = 0.0


@dataclass(frozen=True)
class LabelledExample:
    """A tokenised answer that is good or not, with the end id, if it was not cut.

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
    """Tokenised rows. `kept` are those that are used, in order; `counts` of those that were too long."""

    kept: list[int]
    counts: LengthCounts

    def __len__(self) -> int: ...

    def example(self, row: int) -> PairExample | LabelledExample: ...


class PairRows:
    """Pairs. Prompt and responses are tokenised apart, so that the boundary is the one that generation meets.

    Raises ValueError for ids outside the vocabulary, and for rows that are too long where the policy is ERROR.
    """

    def __init__(self, pairs: Sequence[TextPreference], tokenizer: Tokenizer, limits: Limits) -> None:
        prompts = TokenRows(tokenizer.encode_prompts([pair.prompt for pair in pairs]))
        answers = [_responses([pair.chosen for pair in pairs], tokenizer),
                   _responses([pair.rejected for pair in pairs], tokenizer)]
        fitted = _fit(prompts, answers, [pair.origin for pair in pairs], limits)
        self.prompts, (self.chosen, self.rejected) = fitted.prompts, fitted.responses
        self.margins = [pair.margin for pair in pairs]
        self.kept, self.counts = fitted.kept, fitted.counts

    def __len__(self) -> int:
        return len(self.prompts)

    def example(self, row: int) -> PairExample:
        return PairExample(row, self.prompts[row], self.chosen[row], self.rejected[row], self.margins[row])


class LabelRows:
    """Single answers, tokenised and limited as `PairRows` are."""

    def __init__(self, labels: Sequence[TextLabel], tokenizer: Tokenizer, limits: Limits) -> None:
        prompts = TokenRows(tokenizer.encode_prompts([label.prompt for label in labels]))
        answers = [_responses([label.response for label in labels], tokenizer)]
        fitted = _fit(prompts, answers, [label.origin for label in labels], limits)
        self.prompts, (self.responses,) = fitted.prompts, fitted.responses
        self.desirable = [label.desirable for label in labels]
        self.kept, self.counts = fitted.kept, fitted.counts

    def __len__(self) -> int:
        return len(self.prompts)

    def example(self, row: int) -> LabelledExample:
        return LabelledExample(row, self.prompts[row], self.responses[row], self.desirable[row])


def _responses(texts: Sequence[str], tokenizer: Tokenizer) -> TokenRows:
    return TokenRows([[*tokenizer.encode(text), tokenizer.eos_id] for text in texts])


@dataclass(frozen=True)
class _Fitted:
    """Rows under the limits: every row, cut where it is to be, and the rows that are used, in order."""

    prompts: TokenRows
    responses: tuple[TokenRows, ...]
    kept: list[int]
    counts: LengthCounts


def _fit(prompts: TokenRows, responses: Sequence[TokenRows], origins: Sequence[str], limits: Limits) -> _Fitted:
    for rows in (prompts, *responses):
        check_ids(rows, origins, limits.vocab_size)
    fitted = _cut(prompts, responses, limits) if limits.overlong.truncates else _Fitted(
        prompts, tuple(responses), kept := _within(prompts, responses, origins, limits),
        LengthCounts(dropped=len(prompts) - len(kept)))
    if not fitted.kept:
        raise ValueError(f"no row has both a prompt within {PROMPT_KEY} = {limits.prompt} tokens and responses within "
                         f"{RESPONSE_KEY} = {limits.response}; raise one of them")
    return fitted


def _within(prompts: TokenRows, responses: Sequence[TokenRows], origins: Sequence[str], limits: Limits) -> list[int]:
    kept = set(within_length(prompts, origins, limits.prompt, limits.overlong, PROMPT_KEY))
    for rows in responses:
        kept &= set(within_length(rows, origins, limits.response, limits.overlong, RESPONSE_KEY))
    return sorted(kept)


def _cut(prompts: TokenRows, responses: Sequence[TokenRows], limits: Limits) -> _Fitted:
    """Prompts are cut on the side that the policy names, responses as `LengthRule.response` says. A pair whose answers
    are the same as far as they are kept says nothing and is left out.
    """
    of_prompt = LengthRule(limits.prompt, limits.overlong, PROMPT_KEY)
    of_response = LengthRule(limits.response, limits.overlong, RESPONSE_KEY)
    whole = [*zip(prompts, *responses, strict=True)]
    cut = [(of_prompt.prompt(prompt), *(of_response.response(answer) for answer in answers))
           for prompt, *answers in whole]
    kept = [row for row, (_, *answers) in enumerate(cut)
            if None not in answers and len({tuple(answer) for answer in answers}) == len(answers)]
    truncated = sum(any(len(part) < len(before) for part, before in zip(cut[row], whole[row])) for row in kept)
    halves = [TokenRows([half or () for half in column]) for column in zip(*cut)]
    return _Fitted(halves[0], tuple(halves[1:]), kept, LengthCounts(len(whole) - len(kept), truncated))


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
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def counts(self) -> LengthCounts:
        return self.rows.counts

    @property
    def epoch(self) -> int:
        return self.cursor.epoch

    def __iter__(self) -> PreferenceLoader[Example]:
        return self

    def __next__(self) -> tuple[Example, ...]:
        """The examples of the next step."""
        return self.take(self.examples_per_step)

    def take(self, count: int) -> tuple[Example, ...]:
        """The next `count` examples."""
        return tuple(self.rows.example(self.rows.kept[visit.row]) for visit in self.cursor.take(count))

    def state_dict(self) -> dict[str, int]:
        """{"seed", "epoch", "index"} of the next example."""
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
