"""Rewards from a Python function: load it, score rows with it, count what went wrong.

The function runs in a worker process (see `pool`), never in the process of a rank. Each rank has its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from hybridflow.rewards import reasoning
from hybridflow.rewards.pool import WorkerPool
from hybridflow.rewards.records import RewardRequest, RewardResult
from hybridflow.rewards.worker import Target


class ReasoningScoring(Enum):
    """How an answer to a reasoning-gym task is scored: right or not, or with the task's own part credit."""

    EXACT = "exact"
    PARTIAL = "partial"


class RewardFunction:
    """A loaded reward function; usable from any thread, but not from several at once. Close it in the end."""

    def __init__(self, target: Target, *, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise ValueError(f"reward.timeout_s is {timeout_s}; it must be positive, for example 10.0")
        self._pool = WorkerPool(target, timeout_s)
        self._pool.start()

    @classmethod
    def load(cls, spec: str, *, timeout_s: float) -> RewardFunction:
        """Start a worker that has loaded `spec` = "file.py:function" and wait for it.

        The function is called with the keywords data_source, solution_str, ground_truth, extra_info (a dict; under
        "entry" it holds the generated entry where there is one) and returns a number, or a dict with one under "score";
        the rest of the dict are extras. Its file may import its neighbours.

        Args:
            spec: path (relative: to the working directory) and name of the function.
            timeout_s: seconds that one row may take.

        Raises:
            ValueError: the form of `spec` is wrong, the file is missing or does not import, the function is missing
                (with the nearest name) or does not take the keywords, or timeout_s is not positive.
        """
        return cls(parse_spec(spec), timeout_s=timeout_s)

    @classmethod
    def reasoning_gym(cls, scoring: ReasoningScoring, tasks: Collection[str], *, timeout_s: float) -> RewardFunction:
        """The scorer of reasoning-gym tasks (see `reasoning`); requests must have their `entry`. Raises like `load`."""
        function = reasoning.score_exact if scoring is ReasoningScoring.EXACT else reasoning.score_partial
        needs_library = scoring is ReasoningScoring.PARTIAL or reasoning.SEVERAL_RIGHT_ANSWERS.intersection(tasks)
        target = Target(reasoning.__name__, function.__name__, preload=(reasoning.LIBRARY,) if needs_library else ())
        return cls(target, timeout_s=timeout_s)

    def score(self, rows: Sequence[RewardRequest]) -> RewardResult:
        """The scores of `rows`, in order, NaN where a row failed. Rows past the limit run side by side: the call ends
        about timeout_s after its last healthy row (for up to `pool.MAX_WORKERS` such rows).

        Raises:
            ValueError: a worker that was killed cannot load the function again.
        """
        return RewardResult.of(self._pool.run([_keywords(row) for row in rows]))

    def close(self) -> None:
        """End the workers. A later `score` starts new ones."""
        self._pool.close()


def parse_spec(spec: str) -> Target:
    """The target of "file.py:function"; the file is looked for, not opened.

    Raises:
        ValueError: the form is wrong, or there is no such file.
    """
    place, colon, function = spec.rpartition(":")
    if not colon or not place.endswith(".py") or not function.isidentifier():
        raise ValueError(f"reward.function is {spec!r}; it must be file.py:function, for example rewards/math.py:score")
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"reward.function is {spec!r}, but there is no file {path}")
    return Target(str(path), function)


def _keywords(row: RewardRequest) -> dict[str, Any]:
    info = dict(row.extra_info) if row.entry is None else {**row.extra_info, "entry": dict(row.entry)}
    return {
        "data_source": row.data_source,
        "solution_str": row.solution,
        "ground_truth": row.ground_truth,
        "extra_info": info,
    }
