"""Rewards from a Python function: load it, score rows with it, count what went wrong.

The function runs in a worker process (see `pool`), never in the process of a rank. Each rank has its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Hashable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from hybridflow.rewards import reasoning
from hybridflow.rewards.dispatch import Dispatcher
from hybridflow.rewards.limits import Limits
from hybridflow.rewards.loading import Target
from hybridflow.rewards.pool import WorkerPool
from hybridflow.rewards.process import Call
from hybridflow.rewards.records import Outcome, RewardRequest, RewardResult


class ReasoningScoring(Enum):
    """How an answer to a reasoning-gym task is scored: right or not, or with the task's own part credit."""

    EXACT = "exact"
    PARTIAL = "partial"


class RewardFunction:
    """A loaded reward function. Rows are handed in by `submit`, from any thread, while their siblings are still being
    generated, and `collect` waits for what they gave; `score` is both at once. Close it in the end.

    Attributes:
        batched: whether it is called once for all rows that are collected, with lists.
    """

    def __init__(self, target: Target, limits: Limits, num_workers: int | None = None) -> None:
        """`num_workers` as in `WorkerPool`. Raises ValueError where the function cannot be loaded."""
        pool = WorkerPool(target, limits, num_workers)
        self.batched = pool.start()
        self._dispatcher = Dispatcher(pool)
        self._held: dict[Hashable, RewardRequest] = {}  # rows of a batched function, until they are collected
        self._submitted: dict[Hashable, None] = {}
        self._num_scored = 0

    @classmethod
    def load(cls, spec: str, *, timeout_s: float, memory_mb: int | None = None, num_workers: int | None = None,
             batched: bool | None = None) -> RewardFunction:
        """Start a worker that has loaded `spec` = "file.py:function" and wait for it.

        The function is called with the keywords data_source, solution_str, ground_truth, extra_info (a dict; under
        "entry" it holds the generated entry where there is one) and returns a number, or a dict with one under "score";
        the rest of the dict are extras. With data_sources, solution_strs, ground_truths, extra_infos in their place it
        gets lists, and returns one of these for each row. (These are verl's reward functions, and those of its batch
        reward manager.) Its file may import its neighbours.

        Args:
            spec: path (relative: to the working directory) and name of the function.
            timeout_s: seconds that one call may take: one row, or all rows of a batched function.
            memory_mb: as in `Limits`.
            num_workers: as in `WorkerPool`.
            batched: whether it takes lists; None reads that off its signature.

        Raises:
            ValueError: the form of `spec` is wrong, the file is missing or does not import, the function is missing
                (with the nearest name) or does not take the keywords, or a limit is not positive.
        """
        return cls(parse_spec(spec, batched), Limits(timeout_s, memory_mb), num_workers)

    @classmethod
    def reasoning_gym(cls, scoring: ReasoningScoring, tasks: Collection[str], *, timeout_s: float,
                      memory_mb: int | None = None, num_workers: int | None = None) -> RewardFunction:
        """The scorer of reasoning-gym tasks (see `reasoning`); requests must have their `entry`. Raises like `load`."""
        function = reasoning.score_exact if scoring is ReasoningScoring.EXACT else reasoning.score_partial
        needs_library = scoring is ReasoningScoring.PARTIAL or reasoning.SEVERAL_RIGHT_ANSWERS.intersection(tasks)
        target = Target(reasoning.__name__, function.__name__, preload=(reasoning.LIBRARY,) if needs_library else ())
        return cls(target, Limits(timeout_s, memory_mb), num_workers)

    def submit(self, row_id: Hashable, request: RewardRequest) -> None:
        """Have a row scored. Returns at once; a batched function begins when its rows are collected.

        Args:
            row_id: by which `collect` knows the row; not that of another row that has not been collected yet.
        """
        assert row_id not in self._submitted, f"{row_id!r} has been submitted and not collected"
        if self.batched:
            self._held[row_id] = request
        else:
            self._dispatcher.submit(_call(row_id, [request]))
        self._submitted[row_id] = None

    def collect(self, row_ids: Sequence[Hashable] | None = None) -> dict[Hashable, Outcome]:
        """Wait for the outcomes of these rows (None: of all that were submitted). Rows past the limit run side by side:
        the call ends about timeout_s after its last healthy row (for up to `pool.MAX_WORKERS` such rows).

        Raises:
            ValueError: a worker that was killed cannot load the function again.
        """
        row_ids = list(self._submitted) if row_ids is None else list(row_ids)
        if not row_ids:
            return {}
        for row_id in row_ids:
            del self._submitted[row_id]
        if not self.batched:
            return {row_id: given[0] for row_id, given in zip(row_ids, self._dispatcher.collect(row_ids))}
        call = _call(tuple(row_ids), [self._held.pop(row_id) for row_id in row_ids])
        self._dispatcher.submit(call)
        (outcomes,) = self._dispatcher.collect([call.ticket])
        return dict(zip(row_ids, outcomes, strict=True))

    def score(self, rows: Sequence[RewardRequest]) -> RewardResult:
        """The scores of `rows`, in order, NaN where a row failed. Raises like `collect`."""
        self._num_scored += 1
        row_ids = [("score", self._num_scored, place) for place in range(len(rows))]
        for row_id, row in zip(row_ids, rows):
            self.submit(row_id, row)
        outcomes = self.collect(row_ids)
        return RewardResult.of([outcomes[row_id] for row_id in row_ids])

    def close(self) -> None:
        """End the workers, and forget what was not collected. A later row starts new ones."""
        self._dispatcher.close()
        self._held.clear()
        self._submitted.clear()


def parse_spec(spec: str, batched: bool | None = None) -> Target:
    """The target of "file.py:function"; the file is looked for, not opened.

    Raises:
        ValueError: the form is wrong, or there is no such file.
    """
    place, colon, function = spec.rpartition(":")
    if not colon or not place.endswith(".py") or not function.isidentifier():
        raise ValueError(f"{spec!r} is not file.py:function; write for example rewards/math.py:score")
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    return Target(str(path), function, batched=batched)


def _call(ticket: Hashable, rows: Sequence[RewardRequest]) -> Call:
    """Pickled here, so that what cannot be pickled is an error of whoever submits it."""
    return Call(ticket, len(rows), pickle.dumps([_keywords(row) for row in rows]))


def _keywords(row: RewardRequest) -> dict[str, Any]:
    info = dict(row.extra_info) if row.entry is None else {**row.extra_info, "entry": dict(row.entry)}
    return {
        "data_source": row.data_source,
        "solution_str": row.solution,
        "ground_truth": row.ground_truth,
        "extra_info": info,
    }
