"""Batches for supervised fine-tuning: (prompt ids, response ids), from the same records as prompts.

Owns making pairs out of records and tokenising both halves. Packing and loss are the trainer's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.data.epoch_order import EpochCursor
from hybridflow.data.records import PromptRecord, TextPair
from hybridflow.data.token_rows import Overlong, TokenRows, check_ids, within_length
from hybridflow.data.tokenizer import Tokenizer

# The keys that bound a pair, as messages name them.
LENGTH_KEYS = "data.max_prompt_length + generation.max_new_tokens"


@dataclass(frozen=True)
class SftExample:
    """One supervised example; `response_ids` ends with the end id, which is trained like any other token.

    Example: SftExample(id=13, prompt_ids=(1, 52, 7), response_ids=(9, 2))
    """

    id: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]


def sft_pairs(records: Sequence[PromptRecord]) -> tuple[TextPair, ...]:
    """(prompt, ground truth) of each record."""
    return tuple(TextPair(record.prompt, record.ground_truth, record.origin) for record in records)


class SftLoader:
    """An endless sequence of batches of exactly `examples_per_step` examples, ordered as PromptLoader orders prompts.

    The two halves are tokenised apart, so that the boundary is the one that generation meets.
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
    ) -> None:
        """max_length: tokens of prompt and response with its end id, None for no limit. vocab_size: the model's.

        Raises ValueError as PromptLoader does.
        """
        if examples_per_step < 1:
            raise ValueError(f"examples_per_step is {examples_per_step}; it must be at least 1")
        self.examples_per_step = examples_per_step
        origins = [pair.origin for pair in pairs]
        self.prompts = TokenRows(tokenizer.encode_prompts([pair.prompt for pair in pairs]))
        self.responses = TokenRows([[*tokenizer.encode(pair.response), tokenizer.eos_id] for pair in pairs])
        for rows in (self.prompts, self.responses):
            check_ids(rows, origins, tokenizer.vocab_size if vocab_size is None else vocab_size)
        self.kept = list(range(len(pairs)))
        if max_length is not None:
            whole = TokenRows([prompt + response for prompt, response in zip(self.prompts, self.responses)])
            self.kept = within_length(whole, origins, max_length, overlong, LENGTH_KEYS)
        self.cursor = EpochCursor(len(self.kept), seed, shuffle)

    @property
    def num_dropped(self) -> int:
        """Pairs left out because they are too long."""
        return len(self.prompts) - len(self.kept)

    def __iter__(self) -> "SftLoader":
        return self

    def __next__(self) -> tuple[SftExample, ...]:
        """The examples of the next step."""
        batch = []
        for visit in self.cursor.take(self.examples_per_step):
            row = self.kept[visit.row]
            example_id = visit.epoch * len(self.prompts) + row
            batch.append(SftExample(example_id, self.prompts[row], self.responses[row]))
        return tuple(batch)

    def state_dict(self) -> dict[str, int]:
        """{"epoch", "index"} of the next example."""
        return self.cursor.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state`."""
        self.cursor.load_state_dict(state)
