"""Which waiting samples enter the batch next, and how they share prefills and caches. Pure planning: no tensors.

Whatever is decided here changes speed and memory only, never a token (rule 4 of the design).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from hybridflow.generation.records import Prompt
from hybridflow.parallel.arithmetic import ceil_div


@dataclass(frozen=True)
class Limits:
    """What may be at work at once. Example: `Limits(max_rows=128, max_prefill_tokens=8192)`.

    Attributes:
        max_rows: rows that decode together.
        max_prefill_tokens: prompt tokens of one prefill; a single longer prompt is still taken, alone.
    """

    max_rows: int
    max_prefill_tokens: int


@dataclass(frozen=True)
class SharedPrompt:
    """A distinct prompt and the requests that continue it. Example: `SharedPrompt((5, 9), (3, 0))`."""

    ids: tuple[int, ...]
    requests: tuple[int, ...]


def waiting_order(prompts: Sequence[Prompt]) -> list[int]:
    """Indices of `prompts`, longest prompt first, equal prompts side by side.

    So neighbours have similar lengths, and a lack of memory shows at the start.
    """
    return sorted(range(len(prompts)), key=lambda i: (-len(prompts[i].ids), prompts[i].ids, i))


def admit(waiting: Sequence[int], prompts: Sequence[Prompt], num_running: int, limits: Limits) -> list[SharedPrompt]:
    """The requests to prefill now, as distinct prompts; none while the running rows should go on alone.

    They wait until a quarter of the batch is free, or all that waits fits, so that prefills are few; and until all
    samples of a prompt fit, so that its prefill is shared. A prompt with more samples than the batch has rows is cut.

    Args:
        waiting: indices of `prompts` in `waiting_order`; what is admitted are its first ones.
        num_running: rows that decode at present.
    """
    free = limits.max_rows - num_running
    if free < min(len(waiting), ceil_div(limits.max_rows, 4)):
        return []
    cohort: list[SharedPrompt] = []
    rows = tokens = 0
    for ids, group in groupby(waiting, key=lambda i: prompts[i].ids):
        requests = tuple(group)
        rows += len(requests)
        tokens += len(ids)
        if rows > free and (cohort or num_running) or cohort and tokens > limits.max_prefill_tokens:
            break
        cohort.append(SharedPrompt(ids, requests[:free]))
    return cohort


def similar_lengths(cohort: Sequence[SharedPrompt]) -> list[list[SharedPrompt]]:
    """Cut a cohort, longest first, into runs that share one cache.

    In a run no prompt is more than a quarter (or 16 tokens) shorter than the longest: more runs would save less
    masked work than their extra calls cost.
    """
    runs: list[list[SharedPrompt]] = []
    for prompt in cohort:
        longest = len(runs[-1][0].ids) if runs else 0
        if not runs or longest - len(prompt.ids) > max(16, longest // 4):
            runs.append([])
        runs[-1].append(prompt)
    return runs


def cheapest_merge(groups: Sequence[tuple[int, int]]) -> int:
    """The index of the group to merge with the next one so that attention gains the least masked work.

    Rows that outlive their cohort would else leave many caches of a row or two, each with its own calls.

    Args:
        groups: rows and columns of each cache, at least two. Example: `cheapest_merge([(64, 100), (1, 900), (2, 950)])
            == 1`: 1 row more reads 50 columns more.
    """
    def added(i: int) -> int:
        (rows, columns), (next_rows, next_columns) = groups[i : i + 2]
        return (rows + next_rows) * max(columns, next_columns) - rows * columns - next_rows * next_columns
    return min(range(len(groups) - 1), key=added)
