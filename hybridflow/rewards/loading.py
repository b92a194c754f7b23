"""Finds the function that a target names, in the process where it will run, and how it wants to be called.

Standard library only: a worker must start in a fraction of a second.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

# One row, and all rows at once: the keywords of verl's reward functions and of its batch reward manager's.
KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
PLURALS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


@dataclass(frozen=True)
class Target:
    """The function to run. Example: `Target("rewards/math.py", "score")`.

    Attributes:
        place: a file (ends in .py) or the dotted name of a module.
        function: its name there, called with the keywords of `KEYWORDS`, or with lists under those of `PLURALS`.
        preload: modules imported before the first call, so that their import is not counted as a row's time.
        batched: whether it takes lists; None reads that off its signature.
    """

    place: str
    function: str
    preload: tuple[str, ...] = ()
    batched: bool | None = None


@dataclass(frozen=True)
class Loaded:
    """A function and whether it takes lists. Example: `Loaded(score, batched=False)`.

    Attributes:
        by_position: it takes its arguments, which have the right names, by position only.
    """

    function: Callable[..., Any]
    batched: bool
    by_position: bool = False


class LoadError(Exception):
    """The function cannot be used; the message is for the user."""


def load_function(target: Target) -> Loaded:
    """The callable that `target` names.

    Raises:
        LoadError: the file does not import, has no such function, or the function does not take the keywords.
    """
    try:
        for name in target.preload:
            importlib.import_module(name)
        module = _module(target.place)
    except BaseException as error:
        raise LoadError(f"{target.place} does not import: {one_line(error)}") from error
    function = vars(module).get(target.function)
    if function is None:
        raise LoadError(f"{target.place} has no function {target.function!r}; {_nearest(target.function, module)}")
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise LoadError(f"{target.function!r} in {target.place} is not a plain function")
    return _fitted(function, target)


def _fitted(function: Callable[..., Any], target: Target) -> Loaded:
    """How the function is called."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some compiled callables have none; the first call will tell
        return Loaded(function, bool(target.batched))
    batched = _names_lists(signature) if target.batched is None else target.batched
    keywords = PLURALS if batched else KEYWORDS
    if _positional_names(signature)[:len(keywords)] == keywords:
        return Loaded(function, batched, by_position=True)
    try:
        signature.bind(**dict.fromkeys(keywords))
    except TypeError as error:
        raise LoadError(f"{target.function}{signature} in {target.place} does not take the keywords "
                        f"{', '.join(keywords)}: {error}") from error
    return Loaded(function, batched)


def _names_lists(signature: inspect.Signature) -> bool:
    """Whether a parameter has a plural's name, and none that of one row."""
    return bool(set(PLURALS) & set(signature.parameters)) and not set(KEYWORDS) & set(signature.parameters)


def _positional_names(signature: inspect.Signature) -> tuple[str, ...]:
    kind = inspect.Parameter.POSITIONAL_ONLY
    return tuple(name for name, parameter in signature.parameters.items() if parameter.kind is kind)


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place)
    sys.path.append(str(path.parent))  # its neighbours can be imported; last, so that none hides another library
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up
    spec.loader.exec_module(module)
    return module


def _nearest(name: str, module: ModuleType) -> str:
    functions = [n for n, value in vars(module).items() if inspect.isroutine(value) and not n.startswith("__")]
    close = difflib.get_close_matches(name, functions, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"it has {', '.join(functions)}" if functions else "it has no functions at all"


def one_line(error: BaseException) -> str:
    """An error and where it was raised: "ValueError: no number (reward.py line 7)"."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
    return "".join(traceback.format_exception_only(error)).strip() + where
