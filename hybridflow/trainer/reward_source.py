"""Where scores come from: a reward function on each row's home rank, or a reward model on its mesh.

Owns making requests out of rows and making one table of all ranks' scores. How a function is run, and what a fault is,
belongs to `rewards`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.crew import Crew
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.parallel.world import World
from hybridflow.response_text import ResponseEnds, answer_text
from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.records import FaultKind, RewardRequest, RewardResult
from hybridflow.trainer.roles import RowScores, ScoringRole


class FunctionRewards:
    """Every rank scores the rows at its home.

    Attributes:
        right_score: the reward of a right answer, less rounding.
        last_fault: what went wrong in the last `score`, the same sentence on every rank; None if nothing did.
        last_extras: what the function reported beside the scores it gave last, by row.
    """

    right_score = 1.0 - 1e-9

    def __init__(self, function: RewardFunction, tokenizer: Tokenizer, ends: ResponseEnds, world: World) -> None:
        self.function, self.tokenizer, self.ends, self.world = function, tokenizer, ends, world
        self.last_fault: str | None = None
        self.last_extras: Mapping[int, Mapping[str, Any]] = {}

    def ask(self, batch: Batch, prompts: Sequence[TokenisedPrompt]) -> FunctionJudgement:
        """Have every row judged by the function; its faults and extras are metrics."""
        return FunctionJudgement(self, batch, prompts)

    def close(self) -> None:
        """End the function's workers."""
        self.function.close()

    def request(self, prompt: TokenisedPrompt, response: Sequence[int]) -> RewardRequest:
        record = prompt.record
        return RewardRequest(record.data_source, answer_text(self.tokenizer, response, self.ends),
                             record.ground_truth, record.extra_info, record.entry)

    def tell(self, result: RewardResult, requests: Sequence[RewardRequest], crew: Crew) -> dict[str, float]:
        """The metrics of all ranks' rows, and the first rank's sentence on faults into `last_fault`."""
        faults = {kind.value: result.faults[kind] for kind in FaultKind}
        told = crew.share([faults, result.fault_sentence(requests), _numbers(result)])
        total = sum(sum(counts.values()) for counts, _, _ in told)
        sentences = [(rank, sentence) for rank, (_, sentence, _) in zip(crew.group.ranks, told) if sentence is not None]
        self.last_fault = next((f"{total} rewards failed over all ranks; rank {rank}: {sentence}" if crew.size > 1
                                else sentence for rank, sentence in sentences), None)
        metrics = {f"reward/faults_{name}": float(sum(counts[name] for counts, _, _ in told)) for name in faults}
        extras: dict[str, list[float]] = defaultdict(list)
        for _, _, numbers in told:
            for name, values in numbers.items():
                extras[name] += values
        return metrics | {f"reward/extra_{name}": sum(values) / len(values) for name, values in extras.items()}


class FunctionJudgement:
    """Rows at home here, to be judged by the function of `source`."""

    def __init__(self, source: FunctionRewards, batch: Batch, prompts: Sequence[TokenisedPrompt]) -> None:
        self._source, self._num_rows = source, batch.num_rows
        self._mine = list(batch.home[source.world.rank])
        self._requests = [source.request(prompts[batch.groups[row]], sample.response)
                          for row, sample in zip(self._mine, batch.samples)]
        self._result = RewardResult.of([])

    def work(self) -> None:
        """Judge them."""
        self._result = self._source.function.score(self._requests)
        self._source.last_extras = dict(zip(self._mine, self._result.extras, strict=True))

    def result(self, crew: Crew) -> tuple[Tensor, dict[str, float]]:
        """Scores of all rows, and metrics. Collective over the crew, where all rows are at home."""
        table = torch.zeros(self._num_rows, dtype=torch.float64)
        table[self._mine] = self._result.scores
        return crew.sum(table.to(crew.world.device)), self._source.tell(self._result, self._requests, crew)


class ModelRewards:
    """A sequence classifier scores every row at its last token. It has no faults to tell: `last_fault` is None."""

    last_fault: str | None = None
    last_extras: Mapping[int, Mapping[str, Any]] = MappingProxyType({})
    right_score: float | None = None  # its scores have no scale on which an answer is right

    def __init__(self, role: ScoringRole) -> None:
        self.role = role

    def ask(self, batch: Batch, prompts: Sequence[TokenisedPrompt]) -> ModelJudgement:
        """Have every row judged by the model."""
        return ModelJudgement(self.role.ask_rows(batch))

    def close(self) -> None:
        """Nothing to end."""


class ModelJudgement:
    """Rows on their way to a reward model."""

    def __init__(self, asked: RowScores) -> None:
        self._asked = asked

    def work(self) -> None:
        """Let the model score them."""
        self._asked.work()

    def result(self, crew: Crew) -> tuple[Tensor, dict[str, float]]:
        """Scores of all rows. Collective over the crew."""
        return self._asked.result(crew), {}


def _numbers(result: RewardResult) -> dict[str, list[float]]:
    """The extras that have a mean: finite numbers. A scorer may report what it likes beside its score."""
    numbers: dict[str, list[float]] = defaultdict(list)
    for extras in result.extras:
        for name, value in extras.items():
            if isinstance(value, (int, float)) and abs(value) <= sys.float_info.max:  # false for NaN
                numbers[name].append(float(value))
    return numbers
