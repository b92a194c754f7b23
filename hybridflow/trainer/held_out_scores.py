"""What several answers to each held-out prompt say of a model: mean@n, best@k, maj@k, exactly.

Pure functions of rewards and votes. Every value is the expectation over the choice of k of a prompt's n answers, not a
sample of choices: nothing is drawn at random. Asking and scoring are `evaluate`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import comb, exp, fsum, isnan, lgamma, log

import numpy

Metrics = dict[str, float]


class Choice(Enum):
    """How k of n answers are chosen."""

    SUBSET = "subset"  # k different ones, as pass@k has it
    REDRAWN = "redrawn"  # k draws with replacement, as verl's bootstrap has it


@dataclass(frozen=True)
class PromptAnswers:
    """The answers to one prompt: their rewards, NaN where the reward failed, and what each votes for.

    Example: `PromptAnswers("sums", (1.0, 0.0, 1.0), ("12", "13", "12"))`.
    """

    source: str
    rewards: tuple[float, ...]
    votes: tuple[str, ...]

    def judged(self) -> PromptAnswers:
        """Without the answers whose reward failed."""
        kept = [place for place, reward in enumerate(self.rewards) if not isnan(reward)]
        return PromptAnswers(self.source, tuple(self.rewards[i] for i in kept), tuple(self.votes[i] for i in kept))


def best_at(rewards: Sequence[float], k: int, choice: Choice = Choice.SUBSET) -> float:
    """The expected greatest reward of k of the rewards.

    For rewards of 0 and 1, c of n being 1, this is 1 - C(n - c, k) / C(n, k): pass@k of Chen et al. 2021,
    arXiv:2107.03374, eq. 1. In general the i-th least reward is the greatest of C(i - 1, k - 1) of the C(n, k) subsets;
    of k draws with replacement it is the greatest with probability (i / n)^k - ((i - 1) / n)^k.

    Example: `best_at([0.0, 1.0, 0.0], 2) == 2 / 3`. Raises ValueError if k is not in 1 .. n.
    """
    n = _checked(rewards, k)
    ranked = enumerate(sorted(rewards), start=1)
    if choice is Choice.SUBSET:
        return fsum(reward * (comb(i - 1, k - 1) / comb(n, k)) for i, reward in ranked)
    return fsum(reward * ((i / n)**k - ((i - 1) / n)**k) for i, reward in ranked)


def majority_at(rewards: Sequence[float], votes: Sequence[str], k: int, choice: Choice = Choice.SUBSET) -> float:
    """The expected reward of the answer that most of k answers vote for.

    Where several are voted for equally often, each is taken with the same probability; where answers with one vote have
    different rewards, their mean is taken.

    Example: `majority_at([1.0, 1.0, 0.0], ["12", "12", "13"], 3) == 1.0`. Raises ValueError if k is not in 1 .. n.
    """
    n = _checked(rewards, k)
    given: dict[str, list[float]] = defaultdict(list)
    for vote, reward in zip(votes, rewards, strict=True):
        given[vote].append(reward)
    counts = sorted(len(one) for one in given.values())
    wins = {count: _win(count, _without(counts, count), n, k, choice) for count in set(counts)}
    return fsum(wins[len(one)] * (fsum(one) / len(one)) for one in given.values())


def _win(count: int, others: Sequence[int], n: int, k: int, choice: Choice) -> float:
    """The probability that an answer with `count` of n votes is the one that most of k chosen votes are for.

    If it has j of the k, the other answers, with `others` votes, share k - j so that none has more than j; where t of
    them have j too, it is taken once in t + 1 times. Ways are counted by a polynomial in (votes, ties) for each answer.
    """
    ways = _subsets if choice is Choice.SUBSET else _draws(n, k)
    whole = ways(n, k)
    total = 0.0
    for j in range(1, (min(count, k) if choice is Choice.SUBSET else k) + 1):
        shared = _shared(others, k - j, j, ways)
        total += ways(count, j) * fsum(number / (ties + 1) for ties, number in enumerate(shared))
    return total / whole


def _shared(others: Sequence[int], votes: int, most: int, ways: Callable[[int, int], float]) -> Iterable[float]:
    """For each number of ties the ways to share `votes` out among answers so that none has more than `most`, and so
    many have as many.
    """
    table = numpy.zeros((votes + 1, votes // most + 1))  # [votes shared out, ties]
    table[0, 0] = 1.0
    for count in others:
        grown = table.copy()
        for i in range(1, min(most - 1, votes) + 1):
            grown[i:] += ways(count, i) * table[:-i]
        if most <= votes:
            grown[most:, 1:] += ways(count, most) * table[:-most, :-1]
        table = grown
    return table[votes].tolist()


def _subsets(count: int, chosen: int) -> float:
    return float(comb(count, chosen))


def _draws(n: int, k: int) -> Callable[[int, int], float]:
    """Of sequences of k draws: the terms of an exponential generating function, scaled so that 256 do not underflow."""
    return lambda count, chosen: exp(chosen * log(count * k / n) - lgamma(chosen + 1))


def _without(counts: Sequence[int], count: int) -> list[int]:
    place = counts.index(count)
    return [*counts[:place], *counts[place + 1:]]


def _checked(rewards: Sequence[float], k: int) -> int:
    if not 1 <= k <= len(rewards):
        raise ValueError(f"k is {k}; of {len(rewards)} answers it may be 1 to {len(rewards)}")
    return len(rewards)


def subset_sizes(n: int) -> list[int]:
    """Powers of 2 below n, and n. Example: `subset_sizes(6) == [1, 2, 4, 6]`."""
    return [*(2**power for power in range(n.bit_length()) if 2**power < n), n]


def held_out_metrics(prompts: Sequence[PromptAnswers], n: int, *, redrawn: bool = False) -> Metrics:
    """`<source>/mean@n` and so on for every data source, and over all prompts, without a source in the name, where
    there are several answers to each.

    Values are means over prompts: of mean@n and std@n over those with an answer that has a reward, of best@k and maj@k
    over those with at least k. With n = 1 there is mean@1 alone. `redrawn` adds best_redrawn@k and maj_redrawn@k.
    """
    judged = [prompt for prompt in map(PromptAnswers.judged, prompts) if prompt.rewards]
    by_source: dict[str, list[PromptAnswers]] = defaultdict(list)
    for prompt in judged:
        by_source[f"{prompt.source or 'unnamed'}/"].append(prompt)
    if n > 1 and judged:
        by_source[""] = judged
    return {f"{source}{name}": value for source, group in by_source.items()
            for name, value in _of_group(group, n, redrawn).items()}


def _of_group(group: Sequence[PromptAnswers], n: int, redrawn: bool) -> Metrics:
    metrics = {f"mean@{n}": _mean(fsum(prompt.rewards) / len(prompt.rewards) for prompt in group)}
    if n == 1:
        return metrics
    metrics[f"std@{n}"] = _mean(float(numpy.std(prompt.rewards)) for prompt in group)
    choices = {Choice.SUBSET: ""} | ({Choice.REDRAWN: "_redrawn"} if redrawn else {})
    for k in subset_sizes(n):
        able = [prompt for prompt in group if len(prompt.rewards) >= k]
        for choice, suffix in choices.items() if able else ():
            metrics[f"best{suffix}@{k}"] = _mean(best_at(prompt.rewards, k, choice) for prompt in able)
            metrics[f"maj{suffix}@{k}"] = _mean(majority_at(prompt.rewards, prompt.votes, k, choice) for prompt in able)
    return metrics


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return fsum(listed) / len(listed)

