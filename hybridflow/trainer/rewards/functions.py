"""A reward function: each row is scored by the rank on which it was handed in, or at its home."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.crew import Crew
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.parallel.world import World
from hybridflow.response_text import ResponseEnds, answer_text
from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.records import RewardRequest
from hybridflow.trainer.rewards.part import Answer, Asked
from hybridflow.trainer.turns import Said, said

# Under this name `extra_info` has the number of the response's tokens, the one that ended it included.
RESPONSE_TOKENS = "response_tokens"
# And where tools may be called the number of turns of the model, and the text of the last one.
NUM_TURNS, LAST_ANSWER = "num_turns", "last_answer"


class FunctionPart:
    """Rows in words, for a function. `right_score` is the reward of a right answer, less rounding."""

    right_score: float | None = 1.0 - 1e-9

    def __init__(self, function: RewardFunction, tokenizer: Tokenizer, ends: ResponseEnds, world: World) -> None:
        self.function, self.tokenizer, self.ends, self.world = function, tokenizer, ends, world

    def submit(self, key: int, row: int, prompt: TokenisedPrompt, response: Sequence[int],
               spoken: Said | None = None) -> None:
        self.function.submit((key, row), self._request(prompt, response, spoken))

    def ask(self, asked: Asked) -> FunctionJudgement:
        home = [(row, sample) for row, sample in asked.at_home(self.world) if row not in asked.elsewhere]
        spoken = dict(zip(asked.batch.home[self.world.rank], said(asked.batch), strict=True))
        for row, sample in home:
            if row not in asked.early:
                self.submit(asked.key, row, asked.prompt(row), sample.response, spoken[row])
        mine = {row for row, _ in home} | (asked.early & set(asked.rows))
        return FunctionJudgement(self.function, asked.key, sorted(mine))

    def close(self) -> None:
        self.function.close()

    def _request(self, prompt: TokenisedPrompt, response: Sequence[int], spoken: Said | None) -> RewardRequest:
        """Where tools may be called, the solution is all behind the prompt, what tools said too."""
        record, info = prompt.record, {RESPONSE_TOKENS: len(response)}
        if spoken is not None:
            info |= {NUM_TURNS: spoken.turns, LAST_ANSWER: answer_text(self.tokenizer, spoken.last, self.ends)}
        return RewardRequest(record.data_source, answer_text(self.tokenizer, response, self.ends), record.ground_truth,
                             {**record.extra_info, **info}, record.entry)


class FunctionJudgement:
    """Rows that workers score by themselves, and this rank collects."""

    def __init__(self, function: RewardFunction, key: int, rows: Sequence[int]) -> None:
        self._function, self._key, self._rows = function, key, rows

    def work(self) -> None:
        """Workers do it."""

    def answer(self, crew: Crew) -> Answer:
        outcomes = self._function.collect([(self._key, row) for row in self._rows])
        return Answer({row: outcomes[self._key, row] for row in self._rows})
