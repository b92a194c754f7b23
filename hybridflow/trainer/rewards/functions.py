"""A reward function: each row is scored by the rank on which it was handed in, or at its home."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.parallel.world import World
from hybridflow.response_text import ResponseEnds, answer_text
from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.records import RewardRequest
from hybridflow.trainer.rewards.part import Answer, Asked

# Under this name `extra_info` has the number of the response's tokens, the one that ended it included.
RESPONSE_TOKENS = "response_tokens"


class FunctionPart:
    """Rows in words, for a function. `right_score` is the reward of a right answer, less rounding."""

    right_score: float | None = 1.0 - 1e-9
    runs_beside = True

    def __init__(self, function: RewardFunction, tokenizer: Tokenizer, ends: ResponseEnds, world: World) -> None:
        self.function, self.tokenizer, self.ends, self.world = function, tokenizer, ends, world

    def submit(self, key: int, row: int, prompt: TokenisedPrompt, response: Sequence[int]) -> None:
        self.function.submit((key, row), self._request(prompt, response))

    def begin(self, asked: Asked) -> None:
        for row, sample in asked.at_home(self.world):
            if row not in asked.early and row not in asked.elsewhere:
                self.submit(asked.key, row, asked.prompt(row), sample.response)

    def finish(self, asked: Asked) -> Answer:
        home = {row for row, _ in asked.at_home(self.world)} - asked.elsewhere
        mine = sorted(home | (asked.early & set(asked.rows)))
        outcomes = self.function.collect([(asked.key, row) for row in mine])
        return Answer({row: outcomes[asked.key, row] for row in mine})

    def close(self) -> None:
        self.function.close()

    def _request(self, prompt: TokenisedPrompt, response: Sequence[int]) -> RewardRequest:
        record = prompt.record
        return RewardRequest(record.data_source, answer_text(self.tokenizer, response, self.ends), record.ground_truth,
                             {**record.extra_info, RESPONSE_TOKENS: len(response)}, record.entry)
