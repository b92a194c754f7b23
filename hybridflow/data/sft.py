"""Batches for supervised fine-tuning: (prompt ids, response ids), from the same records as prompts.

Owns making pairs out of records and tokenising both halves. Packing and loss are the trainer's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.data.epoch_order import EpochCursor
from hybridflow.data.lengths import LengthCounts, LengthRule
from hybridflow.data.records import PromptRecord, TextPair
from hybridflow.data.row_source import Numbering
from hybridflow.data.token_rows import Overlong, TokenRows, check_ids, within_length
from hybridflow.data.tokenizer import Tokenizer

# The keys that bound a pair, as messages name them.
LENGTH_KEYS = "data.max_prompt_length + generation.max_new_tokens"


@dataclass(frozen=True)
class SftExample:
    """One supervised example; `response_ids` ends with the end id, which is trained like any other token (a response
    that was cut has none).

    Example: SftExample(id=13, prompt_ids=(1, 52, 7), response_ids=(9, 2))
    """

    id: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]


@dataclass(frozen=True)
class TokenPairs:
    """Both halves of each pair, row for row."""

    prompts: TokenRows
    responses: TokenRows


def sft_pairs(records: Sequence[PromptRecord]) -> tuple[TextPair, ...]:
    """(prompt, ground truth) of each record."""
    return tuple(TextPair(record.prompt, record.ground_truth, record.origin) for record in records)


def tokenise_pairs(pairs: Sequence[TextPair], tokenizer: Tokenizer, vocab_size: int | None) -> TokenPairs:
    """The two halves are tokenised apart, so that the boundary is the one that generation meets.

    Raises ValueError naming a pair with an empty half or an id outside the model's vocabulary.
    """
    prompts = TokenRows(tokenizer.encode_prompts([pair.prompt for pair in pairs]))
    responses = TokenRows([[*tokenizer.encode(pair.response), tokenizer.eos_id] for pair in pairs])
    for rows in (prompts, responses):
        check_ids(rows, [pair.origin for pair in pairs], tokenizer.vocab_size if vocab_size is None else vocab_size)
    return TokenPairs(prompts, responses)


class SftLoader:
    """An endless sequence of batches of exactly `examples_per_step` examples, ordered as PromptLoader orders prompts.
    """

    def __init__(
        self,
        pairs: Sequence[TextPair],
        tokenizer: Tokenizer,
        examples_per_step: int,
        seed: int,
        shuffle: bool = True,
        max_length: int | None = None,
        overlong: Overlong = Overlong.ERROR,
        vocab_size: int | None = None,
        numbering: Numbering | None = None,
    ) -> None:
        """max_length: tokens of prompt and response with its end id, None for no limit. vocab_size: the model's.

        Raises ValueError as PromptLoader does.
        """
        if examples_per_step < 1:
            raise ValueError(f"examples_per_step is {examples_per_step}; it must be at least 1")
        self.examples_per_step = examples_per_step
        self.numbering = numbering or Numbering(0, len(pairs))
        tokens = tokenise_pairs(pairs, tokenizer, vocab_size)
        fitted = _fit_pairs(pairs, tokens, LengthRule(max_length, overlong, LENGTH_KEYS))
        self.prompts, self.responses = fitted.tokens.prompts, fitted.tokens.responses
        self.kept, self.counts = fitted.kept, fitted.counts
        self.cursor = EpochCursor(len(self.kept), seed, shuffle)

    @property
    def num_rows(self) -> int:
        return len(self.prompts)

    @property
    def epoch(self) -> int:
        return self.cursor.epoch

    @property
    def num_dropped(self) -> int:
        """Pairs left out because they are too long."""
        return self.counts.dropped

    def __iter__(self) -> "SftLoader":
        return self

    def __next__(self) -> tuple[SftExample, ...]:
        """The examples of the next step."""
        return self.take(self.examples_per_step)

    def take(self, count: int) -> tuple[SftExample, ...]:
        """The next `count` examples."""
        batch = []
        for visit in self.cursor.take(count):
            row = self.kept[visit.row]
            batch.append(SftExample(self.numbering.id(visit.epoch, row), self.prompts[row], self.responses[row]))
        return tuple(batch)

    def state_dict(self) -> dict[str, int]:
        """{"seed", "epoch", "index"} of the next example."""
        return self.cursor.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state`."""
        self.cursor.load_state_dict(state)


@dataclass(frozen=True)
class _FittedPairs:
    """Pairs under a length rule: every row, cut where it is to be, and the rows that are used, in order."""

    tokens: TokenPairs
    kept: list[int]
    counts: LengthCounts


def _fit_pairs(pairs: Sequence[TextPair], tokens: TokenPairs, rule: LengthRule) -> _FittedPairs:
    whole = [*zip(tokens.prompts, tokens.responses, strict=True)]
    if rule.most is None:
        return _FittedPairs(tokens, list(range(len(whole))), LengthCounts())
    if not rule.overlong.truncates:
        kept = within_length(TokenRows([prompt + response for prompt, response in whole]),
                             [pair.origin for pair in pairs], rule.most, rule.overlong, rule.knob)
        return _FittedPairs(tokens, kept, LengthCounts(dropped=len(whole) - len(kept)))
    cut = [rule.pair(prompt, response) for prompt, response in whole]
    kept = [row for row, pair in enumerate(cut) if pair is not None]
    if not kept:
        raise ValueError(f"none of {len(whole)} responses leaves room for a prompt within {rule.knob} = {rule.most} "
                         f"tokens. Set {rule.knob} higher")
    truncated = sum(len(whole[row][0]) + len(whole[row][1]) > rule.most for row in kept)
    empty: tuple = ((), ())
    rows = TokenPairs(*(TokenRows([(pair or empty)[half] for pair in cut]) for half in (0, 1)))
    return _FittedPairs(rows, kept, LengthCounts(len(whole) - len(kept), truncated))
