"""What runs in a worker of tools: looks for a call in a turn, and calls the user's function.

The worker is one of `rewards` (killed when a call takes too long), so that `answer_turn` has the keywords of a reward
and returns its answer as extras beside a score that means nothing. Standard library only.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hybridflow.tools.detect import BUILT_IN, Detector

TEXT_CHARACTERS = 10_000  # of an observation, whatever its tokens
Tool = Callable[..., Any]


def answer_turn(data_source: str, solution_str: str, ground_truth: object,
                extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """What the tool says that a turn calls.

    Args:
        solution_str: the text of the turn.
        extra_info: "file" with the tools, "call" that says how a call is found.

    Returns:
        with "called" False where no tool is; else its "text" and whether that was "cut". Without a turn ("list" in
        extra_info) "names" of the tools.
    """
    tools = tools_of(extra_info["file"])
    detect = detector_of(extra_info["call"])
    if "list" in extra_info:
        return {"score": 0.0, "names": ", ".join(tools)}
    found = detect(solution_str)
    if found is None:
        return {"score": 0.0, "called": False}
    text = called(tools, *found)
    return {"score": 0.0, "called": True, "text": text[:TEXT_CHARACTERS], "cut": len(text) > TEXT_CHARACTERS}


def called(tools: Mapping[str, Tool], name: str, arguments: Mapping[str, Any] | str) -> str:
    """The text that a tool gives.

    Raises:
        ValueError: there is no such tool, or it gives nothing, or what is no text.
    """
    if name not in tools:
        near = difflib.get_close_matches(name, tools, n=1)
        raise ValueError(f"there is no tool {name[:40]!r}; " + (f"did you mean {near[0]}?" if near
                                                              else f"there are {', '.join(tools)}"))
    given = tools[name](arguments) if isinstance(arguments, str) else tools[name](**arguments)
    text = "" if given is None else str(given)
    if not text:
        raise ValueError(f"the tool {name} gave nothing")
    text.encode()  # halves of surrogate pairs: UnicodeEncodeError, which is a ValueError
    return text


@cache
def tools_of(file: str) -> dict[str, Tool]:
    """The public functions that a file defines.

    Raises:
        ValueError: it has none.
    """
    module = _module(file)
    found = {name: value for name, value in vars(module).items()
             if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")}
    if not found:
        raise ValueError(f"{file} defines no function without an underscore in front, which would be a tool")
    return found


@cache
def detector_of(call: str) -> Detector:
    """A built-in form, or the function of file.py:function.

    Raises:
        ValueError: the file has no such function.
    """
    if call in BUILT_IN:
        return BUILT_IN[call]
    file, _, name = call.rpartition(":")
    function = vars(_module(file)).get(name)
    if not callable(function):
        raise ValueError(f"{file} has no function {name!r}")
    return function


@cache
def _module(file: str) -> Any:
    """The module in a file, which may import its neighbours."""
    path = Path(file).expanduser().resolve()
    sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"tool_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
