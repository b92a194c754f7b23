"""Batches of tokenised prompts, the same on every rank that builds the same loader.

Owns tokenising the prompts, their ids over the run, and the position in the data. Never talks to another rank, never
decides which rank gets which prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.data.epoch_order import EpochCursor
from hybridflow.data.lengths import LengthCounts, LengthRule
from hybridflow.data.records import PromptRecord
from hybridflow.data.row_source import Numbering
from hybridflow.data.token_rows import Overlong, TokenRows, check_ids, check_stop_ids, within_length
from hybridflow.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenisedPrompt:
    """One prompt of a step. `id` is unique over the run: see `row_source.Numbering`.

    Example: TokenisedPrompt(id=13, ids=(1, 52, 7), record=...) is record 3 of 10 in its second epoch.
    """

    id: int
    ids: tuple[int, ...]
    record: PromptRecord


class PromptLoader:
    """An endless sequence of batches of exactly `prompts_per_step` prompts, all held in memory.

    The order of an epoch depends on (seed, epoch) alone. An epoch that does not end on a batch boundary continues into
    the next epoch within the batch: no batch is short, no prompt is left out (a batch may then hold one prompt twice,
    under two ids). All prompts are tokenised and checked when the loader is made, about 0.1 s for 4,000 short ones.
    """

    def __init__(
        self,
        records: Sequence[PromptRecord],
        tokenizer: Tokenizer,
        prompts_per_step: int,
        seed: int,
        shuffle: bool = True,
        max_prompt_length: int | None = None,
        overlong: Overlong = Overlong.ERROR,
        vocab_size: int | None = None,
        numbering: Numbering | None = None,
    ) -> None:
        """max_prompt_length: tokens, None for no limit. vocab_size: the model's, None to check nothing against it.
        numbering: of the prompts, None where there is no other source.

        Raises ValueError for an empty data set, a prompt that is empty or too long (by `overlong`), an id outside the
        vocabulary.
        """
        if prompts_per_step < 1:
            raise ValueError(f"prompts_per_step is {prompts_per_step}; it must be at least 1")
        self.prompts_per_step = prompts_per_step
        self.records = tuple(records)
        self.numbering = numbering or Numbering(0, len(self.records))
        fitted = fit_prompts(self.records, tokenise_prompts(self.records, tokenizer, vocab_size),
                             LengthRule(max_prompt_length, overlong))
        self.tokens, self.kept, self.counts = fitted.tokens, fitted.kept, fitted.counts
        self.cursor = EpochCursor(len(self.kept), seed, shuffle)

    @property
    def num_rows(self) -> int:
        return len(self.records)

    @property
    def epoch(self) -> int:
        return self.cursor.epoch

    @property
    def num_dropped(self) -> int:
        """Records left out because their prompts are too long."""
        return self.counts.dropped

    def __iter__(self) -> "PromptLoader":
        return self

    def __next__(self) -> tuple[TokenisedPrompt, ...]:
        """The prompts of the next step."""
        return self.take(self.prompts_per_step)

    def take(self, count: int) -> tuple[TokenisedPrompt, ...]:
        """The next `count` prompts."""
        batch = []
        for visit in self.cursor.take(count):
            record = self.kept[visit.row]
            batch.append(TokenisedPrompt(self.numbering.id(visit.epoch, record), self.tokens[record],
                                         self.records[record]))
        return tuple(batch)

    def state_dict(self) -> dict[str, int]:
        """{"seed", "epoch", "index"} of the next prompt."""
        return self.cursor.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state`; the batches that follow equal those of the run that was not interrupted."""
        self.cursor.load_state_dict(state)


@dataclass(frozen=True)
class FittedPrompts:
    """Prompts under a length rule: ids of every row, cut where they are to be, and the rows that are used, in order."""

    tokens: TokenRows
    kept: list[int]
    counts: LengthCounts


def fit_prompts(records: Sequence[PromptRecord], tokens: TokenRows, rule: LengthRule) -> FittedPrompts:
    """`tokens` of the prompts of `records` under `rule`.

    Raises ValueError naming the longest prompt if the policy is ERROR and one is too long, or if none is left.
    """
    if rule.most is None:
        return FittedPrompts(tokens, list(range(len(tokens))), LengthCounts())
    if rule.overlong.truncates:
        cut = TokenRows([rule.prompt(ids) or () for ids in tokens])
        truncated = sum(len(ids) > rule.most for ids in tokens)
        return FittedPrompts(cut, list(range(len(cut))), LengthCounts(truncated=truncated))
    kept = within_length(tokens, [record.origin for record in records], rule.most, rule.overlong, rule.knob)
    return FittedPrompts(tokens, kept, LengthCounts(dropped=len(tokens) - len(kept)))


def tokenise_prompts(records: Sequence[PromptRecord], tokenizer: Tokenizer, vocab_size: int | None) -> TokenRows:
    """The prompt ids of each record, checked against the model's vocabulary if `vocab_size` is given."""
    rows = TokenRows(tokenizer.encode_prompts([record.prompt for record in records]))
    limit = tokenizer.vocab_size if vocab_size is None else vocab_size
    check_ids(rows, [record.origin for record in records], limit)
    check_stop_ids(tokenizer.stop_ids, limit)
    return rows
