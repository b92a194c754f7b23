"""Keeps the text of a model from being run as code by a library's scorers.

reasoning-gym 0.1.25 (read in each scorer) gives an answer to Python's own evaluation in two ways: directly, where it
may be a list, and by sympy's parser. The first gets literals alone, the second what is an expression of numbers,
letters and known functions; no other text reaches either.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Mapping

# Tasks whose scorers evaluate an answer that may be written as a list, and those that have sympy parse it.
LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
EXPRESSIONS = frozenset({"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24",
                         "simple_integration"})
MOST_CHARACTERS = 2000
FUNCTIONS = ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "coth", "csc", "exp", "ln", "log",
             "pi", "sec", "sin", "sinh", "sqrt", "tan", "tanh", "Abs", "abs")
# A name is a letter or a function's; a point stands in a number only, so that nothing has attributes. Numbers end where
# their digits end: a text is cut in one way only, and a long wrong one is refused at once.
_EXPRESSION = re.compile(
    rf"(?:\s|(?<![A-Za-z0-9_])(?:[A-Za-z]|{'|'.join(FUNCTIONS)})(?![A-Za-z0-9_])|\d+(?:\.\d+)?(?!\d)|[-+*/^(),])*")

Scorer = Callable[[str, Mapping[str, object]], float]


def may_be_scored(task: str, answer: str) -> bool:
    """Whether the scorer of `task` may see `answer`. Example: of countdown "2*(3 + 4)", and not "open(1)"."""
    if task not in EXPRESSIONS:
        return True
    return len(answer) <= MOST_CHARACTERS and _EXPRESSION.fullmatch(answer) is not None


def tamed(task: str, scorer: Scorer) -> Scorer:
    """The scorer, in whose module the name of Python's evaluation now stands for that of literals."""
    if task in LISTS:
        vars(sys.modules[scorer.__module__])["eval"] = ast.literal_eval
    return scorer
