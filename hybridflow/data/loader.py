"""Batches of tokenised prompts, the same on every rank that builds the same loader.

Owns tokenising the prompts, their ids over the run, and the position in the data. Never talks to another rank, never
decides which rank gets which prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.data.epoch_order import EpochCursor
from hybridflow.data.records import PromptRecord
from hybridflow.data.token_rows import Overlong, TokenRows, check_ids, check_stop_ids, within_length
from hybridflow.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenisedPrompt:
    """One prompt of a step. `id` is unique over the run: epoch * (number of records) + record.

    So a prompt has another id, and therefore other samples, in each epoch, but never another one because the data was
    shuffled otherwise or because other prompts were dropped.

    Example: TokenisedPrompt(id=13, ids=(1, 52, 7), record=...) is record 3 of 10 in its second epoch.
    """

    id: int
    ids: tuple[int, ...]
    record: PromptRecord


class PromptLoader:
    """An endless sequence of batches of exactly `prompts_per_step` prompts.

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
    ) -> None:
        """max_prompt_length: tokens, None for no limit. vocab_size: the model's, None to check nothing against it.

        Raises ValueError for an empty data set, a prompt that is empty or too long (by `overlong`), an id outside the
        vocabulary.
        """
        if prompts_per_step < 1:
            raise ValueError(f"prompts_per_step is {prompts_per_step}; it must be at least 1")
        self.prompts_per_step = prompts_per_step
        self.records = tuple(records)
        self.tokens = tokenise_prompts(self.records, tokenizer, vocab_size)
        self.kept = list(range(len(self.records)))
        if max_prompt_length is not None:
            origins = [record.origin for record in self.records]
            self.kept = within_length(self.tokens, origins, max_prompt_length, overlong, "data.max_prompt_length")
        self.cursor = EpochCursor(len(self.kept), seed, shuffle)

    @property
    def num_dropped(self) -> int:
        """Records left out because their prompts are too long."""
        return len(self.records) - len(self.kept)

    def __iter__(self) -> "PromptLoader":
        return self

    def __next__(self) -> tuple[TokenisedPrompt, ...]:
        """The prompts of the next step."""
        batch = []
        for visit in self.cursor.take(self.prompts_per_step):
            record = self.kept[visit.row]
            batch.append(
                TokenisedPrompt(visit.epoch * len(self.records) + record, self.tokens[record], self.records[record])
            )
        return tuple(batch)

    def state_dict(self) -> dict[str, int]:
        """{"epoch", "index"} of the next prompt."""
        return self.cursor.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state`; the batches that follow equal those of the run that was not interrupted."""
        self.cursor.load_state_dict(state)


def tokenise_prompts(records: Sequence[PromptRecord], tokenizer: Tokenizer, vocab_size: int | None) -> TokenRows:
    """The prompt ids of each record, checked against the model's vocabulary if `vocab_size` is given."""
    rows = TokenRows(tokenizer.encode_prompts([record.prompt for record in records]))
    limit = tokenizer.vocab_size if vocab_size is None else vocab_size
    check_ids(rows, [record.origin for record in records], limit)
    check_stop_ids(tokenizer.stop_ids, limit)
    return rows
