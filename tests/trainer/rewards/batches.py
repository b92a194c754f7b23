"""Batches of letters for tests of rewards."""

from collections.abc import Sequence

from hybridflow.batch import Batch
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.records import PromptRecord
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.parallel.world import World

END = 0


class Letters:
    """A tokenizer as far as rewards use one: token 1 is "a", 2 is "b"."""

    def decode(self, ids):
        return "".join(chr(ord("a") + token - 1) for token in ids)


def prompts(num: int, *sources: str) -> list[TokenisedPrompt]:
    """Questions whose answer is "ab", of `sources` in turn or each of its own."""
    return [TokenisedPrompt(row, (5,), PromptRecord(sources[row % len(sources)] if sources else f"set {row}", "?",
                                                    "ab"))
            for row in range(num)]


def rollouts(world: World, answers: Sequence[str]) -> Batch:
    """A row for each answer and prompt; rank r keeps rows r, r + size, ..."""
    responses = [(*(ord(letter) - ord("a") + 1 for letter in answer), END) for answer in answers]
    home = tuple(tuple(range(rank, len(answers), world.size)) for rank in range(world.size))
    samples = tuple(Sample((5,), responses[row]) for row in home[world.rank])
    return Batch((1,) * len(answers), tuple(map(len, responses)), tuple(range(len(answers))), home, samples,
                 TokenColumns())
