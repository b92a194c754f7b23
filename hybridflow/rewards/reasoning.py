"""Scores of answers to reasoning-gym tasks, as reward functions: exact (1 or 0) and partial (the library's credit).

Runs in a worker process: scorers may raise on the text of a model, and need not end. What several would run as code is
kept from them (`plain_answers`). The only module of rewards that knows the library, which is imported when a scorer of
it is needed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from hybridflow.rewards.plain_answers import may_be_scored, tamed

# Tasks whose entry shows one right answer among several, so that its text is not the measure. (0.1.25: read in each
# scorer; for all other tasks the scorer's full marks and its part credit rest on the text of the one answer.)
SEVERAL_RIGHT_ANSWERS = frozenset({
    "boxnet", "countdown", "graph_color", "intermediate_integration", "jugs", "knight_swap", "n_queens",
    "palindrome_generation", "propositional_logic", "puzzle24", "rubiks_cube", "rush_hour", "shortest_path",
    "simple_integration", "sokoban", "tower_of_hanoi", "word_ladder",
})  # fmt: skip
LIBRARY = "reasoning_gym.factory"
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def extract_answer(completion: str) -> str:
    """What the last complete `<answer>...</answer>` holds, else the whole completion; stripped of white space.

    Example: "so <answer> 12 </answer>." gives "12", and "12\\n" gives "12".
    """
    tagged = _TAGGED.findall(completion)
    return (tagged[-1] if tagged else completion).strip()


def score_exact(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
    """1.0 for the right answer, else 0.0.

    Right is the text of the entry's answer; for `SEVERAL_RIGHT_ANSWERS` also what the task's scorer gives full marks.
    Part credit is no help to learning here: many scorers pay for the right answer somewhere in a longer text.

    Raises:
        ValueError: there is nothing to compare with.
    """
    answer, truth = extract_answer(solution_str), ground_truth.strip()
    if truth and answer == truth:
        return 1.0
    if data_source not in SEVERAL_RIGHT_ANSWERS:
        if not truth:
            raise ValueError("there is no ground truth to compare the answer with")
        return 0.0
    score, _ = _library_score(data_source, answer, extra_info["entry"])
    return 1.0 if score >= 1.0 else 0.0


def score_partial(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """The task's own score in [0, 1], and `malformed` = 1.0 where its scorer could not read the answer (score 0)."""
    score, malformed = _library_score(data_source, extract_answer(solution_str), extra_info["entry"])
    return {"score": score, "malformed": float(malformed)}


def _library_score(task: str, answer: str, entry: Mapping[str, Any]) -> tuple[float, bool]:
    """(score, whether the scorer raised on the answer). The scorer has its default settings, not those of the entry.

    A scorer that raises on the model's text but not on the right answer has been given a malformed, hence wrong,
    answer. One that raises on both is broken, and its error travels.
    """
    if not may_be_scored(task, answer):
        return 0.0, True
    scorer = _scorer(task)
    try:
        return float(scorer(answer, entry)), False
    except Exception:
        scorer(entry["answer"], entry)
        return 0.0, True


@functools.cache
def _scorer(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    from reasoning_gym.factory import get_score_answer_fn

    return tamed(task, get_score_answer_fn(task))
