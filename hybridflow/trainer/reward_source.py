"""Where scores come from: a reward function on each row's home rank, or a reward model on its mesh.

Owns making requests out of rows and making one table of all ranks' scores. How a function is run, and what a fault is,
belongs to `rewards`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.exchange import share_json
from hybridflow.parallel.world import World
from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.records import FaultCounts, RewardRequest, RewardResult
from hybridflow.trainer.roles import ScoringRole, sum_over_world


def answer_text(tokenizer: Tokenizer, response: Sequence[int], stop_ids: Sequence[int]) -> str:
    """A response in words, without the token that ended it."""
    ends = bool(response) and response[-1] in stop_ids
    return tokenizer.decode(response[:-1] if ends else response)


class FunctionRewards:
    """Every rank scores the rows at its home."""

    def __init__(self, function: RewardFunction, tokenizer: Tokenizer, stop_ids: tuple[int, ...], world: World) -> None:
        self.function, self.tokenizer, self.stop_ids, self.world = function, tokenizer, stop_ids, world

    def score(self, batch: Batch, prompts: Sequence[TokenisedPrompt]) -> tuple[Tensor, dict[str, float]]:
        """Scores `[rows]` fp64 on every rank, NaN where the function failed; its faults and extras as metrics."""
        mine = list(batch.home[self.world.rank])
        requests = [self._request(prompts[batch.groups[row]], sample.response)
                    for row, sample in zip(mine, batch.samples)]
        result = self.function.score(requests)
        table = torch.zeros(batch.num_rows, dtype=torch.float64)
        table[mine] = result.scores.masked_fill(~result.valid, float("nan"))
        scores = sum_over_world(table.to(self.world.device), self.world)
        return scores, self._metrics(result)

    def close(self) -> None:
        """End the function's workers."""
        self.function.close()

    def _request(self, prompt: TokenisedPrompt, response: Sequence[int]) -> RewardRequest:
        record = prompt.record
        return RewardRequest(record.data_source, answer_text(self.tokenizer, response, self.stop_ids),
                             record.ground_truth, record.extra_info, record.entry)

    def _metrics(self, result: RewardResult) -> dict[str, float]:
        told = share_json(self.world, [result.faults.by_name(), _numbers(result)])
        faults = sum((FaultCounts(**counts) for counts, _ in told), FaultCounts())
        metrics = {f"reward/faults_{name}": float(number) for name, number in faults.by_name().items()}
        extras: dict[str, list[float]] = defaultdict(list)
        for _, numbers in told:
            for name, values in numbers.items():
                extras[name] += values
        return metrics | {f"reward/extra_{name}": sum(values) / len(values) for name, values in extras.items()}


class ModelRewards:
    """A sequence classifier scores every row at its last token."""

    def __init__(self, role: ScoringRole) -> None:
        self.role = role

    def score(self, batch: Batch, prompts: Sequence[TokenisedPrompt]) -> tuple[Tensor, dict[str, float]]:
        """Scores `[rows]` fp64 on every rank."""
        return self.role.score_rows(batch), {}

    def close(self) -> None:
        """Nothing to end."""


def _numbers(result: RewardResult) -> dict[str, list[float]]:
    numbers: dict[str, list[float]] = defaultdict(list)
    for extras in result.extras:
        for name, value in extras.items():
            if isinstance(value, (int, float)):
                numbers[name].append(float(value))
    return numbers
