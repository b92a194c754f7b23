"""best@k and maj@k against every subset, and every sequence of draws, written out."""

import itertools
import math
import random
from collections import Counter

import pytest

from hybridflow.trainer.held_out_scores import (
    Choice,
    PromptAnswers,
    best_at,
    held_out_metrics,
    majority_at,
    subset_sizes,
)

CASES = [
    ([1.0], ["a"]),
    ([1.0, 0.0], ["a", "b"]),
    ([1.0, 0.0, 0.0, 1.0, 0.0], ["a", "b", "b", "a", "c"]),
    ([0.5, -1.0, 2.0, 0.5, 0.25, 3.0], ["a", "a", "b", "b", "c", "a"]),  # rewards differ within a vote
    ([0.0] * 4, list("abcd")),
    ([1.0] * 5, ["a"] * 5),
    ([0.1, 0.7, 0.3, 0.9, 0.2, 0.4, 0.8], list("aabbccd")),
    ([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0], list("aabbaac")),
]


def choices(n, k, choice):
    return itertools.combinations(range(n), k) if choice is Choice.SUBSET else itertools.product(range(n), repeat=k)


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


def vote_of(rewards, votes, chosen):
    """The reward of the most voted answer, averaged over ties and over who gave it."""
    counts = Counter(votes[i] for i in chosen)
    tied = [vote for vote, count in counts.items() if count == max(counts.values())]
    return mean(mean(rewards[i] for i in chosen if votes[i] == vote) for vote in tied)


@pytest.mark.parametrize("choice", Choice)
@pytest.mark.parametrize(("rewards", "votes"), CASES)
def test_every_choice_written_out(rewards, votes, choice):
    n = len(rewards)
    for k in range(1, n + 1 if choice is Choice.SUBSET else min(n, 5) + 1):
        best = mean(max(rewards[i] for i in chosen) for chosen in choices(n, k, choice))
        assert best_at(rewards, k, choice) == pytest.approx(best, abs=1e-12)
        voted = mean(vote_of(rewards, votes, chosen) for chosen in choices(n, k, choice))
        assert majority_at(rewards, votes, k, choice) == pytest.approx(voted, abs=1e-12)


def test_random_answers_written_out():
    draws = random.Random(0)
    for _ in range(30):
        n = draws.randint(1, 9)
        rewards, votes = [draws.gauss(0, 1) for _ in range(n)], [draws.choice("abcd") for _ in range(n)]
        for k in range(1, n + 1):
            sets = list(itertools.combinations(range(n), k))
            assert best_at(rewards, k) == pytest.approx(mean(max(rewards[i] for i in s) for s in sets), abs=1e-12)
            assert majority_at(rewards, votes, k) == pytest.approx(mean(vote_of(rewards, votes, s) for s in sets),
                                                                   abs=1e-12)


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 2), (16, 3), (200, 7), (256, 250)])
def test_of_right_and_wrong_it_is_pass_at_k(n, c):
    """Chen et al. 2021, eq. 1."""
    rewards = [1.0] * c + [0.0] * (n - c)
    for k in subset_sizes(n):
        assert best_at(rewards, k) == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), abs=1e-12)


def test_one_answer_and_all_answers():
    rewards, votes = CASES[3]
    for choice in Choice:
        assert best_at(rewards, 1, choice) == majority_at(rewards, votes, 1, choice) == pytest.approx(5.25 / 6)
    assert best_at(rewards, 6) == 3.0 and majority_at(rewards, votes, 6) == pytest.approx(2.5 / 3)


def test_many_answers_keep_their_precision():
    """All votes differ, or all are the same: the mean."""
    rewards = [i / 256 for i in range(256)]
    for k in (2, 64, 256):
        assert majority_at(rewards, [str(i) for i in range(256)], k) == pytest.approx(255 / 512, abs=1e-10)
        assert majority_at(rewards, list("ab") * 128, k, Choice.REDRAWN) == pytest.approx(255 / 512, abs=1e-10)
        assert majority_at(rewards, ["a"] * 256, k) == pytest.approx(255 / 512, abs=1e-10)


def test_k_beyond_the_answers_is_refused():
    for k in (0, 3):
        with pytest.raises(ValueError, match=f"k is {k}; of 2 answers it may be 1 to 2"):
            best_at([0.0, 1.0], k)


def test_sizes():
    assert [subset_sizes(n) for n in (1, 2, 3, 4, 6, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6],
                                                            [1, 2, 4, 8]]


NAN = math.nan


def test_metrics_by_source_and_over_all():
    prompts = [PromptAnswers("a", (1.0, 0.0), ("x", "y")), PromptAnswers("a", (NAN, 0.0), ("x", "y")),
               PromptAnswers("b", (1.0, 1.0), ("x", "x")), PromptAnswers("b", (NAN, NAN), ("x", "x"))]
    assert held_out_metrics(prompts, 2) == {
        "a/mean@2": 0.25, "a/std@2": 0.25, "a/best@1": 0.25, "a/maj@1": 0.25, "a/best@2": 1.0, "a/maj@2": 0.5,
        "b/mean@2": 1.0, "b/std@2": 0.0, "b/best@1": 1.0, "b/maj@1": 1.0, "b/best@2": 1.0, "b/maj@2": 1.0,
        "mean@2": 0.5, "std@2": 0.5 / 3, "best@1": 0.5, "maj@1": 0.5, "best@2": 1.0, "maj@2": 0.75}
    redrawn = held_out_metrics(prompts[:1], 2, redrawn=True)
    assert redrawn["a/best_redrawn@2"] == redrawn["best_redrawn@2"] == 0.75 and redrawn["a/maj_redrawn@2"] == 0.5


def test_one_answer_has_a_mean_alone():
    prompts = [PromptAnswers("a/b", (0.5,), ("",)), PromptAnswers("", (NAN,), ("",)), PromptAnswers("", (1.0,), ("",))]
    assert held_out_metrics(prompts, 1) == {"a/b/mean@1": 0.5, "unnamed/mean@1": 1.0}
    assert held_out_metrics([], 4) == held_out_metrics(prompts[1:2], 1) == {}
