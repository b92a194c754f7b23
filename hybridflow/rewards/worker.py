"""The process in which a reward function runs: `python -m hybridflow.rewards.worker FD`, started by `process`.

Loads one function, then answers one call after another on the socket FD until the other end is closed. Standard library
only, so that it starts in a fraction of a second; the function's file may import what it likes. The function runs on
the main thread, where it may use signals.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import queue
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
MESSAGE_CHARACTERS = 400
# Processor seconds per core beyond the limit of a row, before the kernel ends the process.
CPU_SLACK_S = 10.0


@dataclass(frozen=True)
class Target:
    """The function to run. Example: `Target("rewards/math.py", "score")`.

    Attributes:
        place: a file (ends in .py) or the dotted name of a module.
        function: its name there, called with the keywords of `KEYWORDS`.
        preload: modules imported before the first call, so that their import is not counted as a row's time.
    """

    place: str
    function: str
    preload: tuple[str, ...] = ()


class LoadError(Exception):
    """The function cannot be used; the message is for the user."""


def load_function(target: Target) -> Callable[..., Any]:
    """The callable that `target` names.

    Raises:
        LoadError: the file does not import, has no such function, or the function does not take the keywords.
    """
    try:
        for name in target.preload:
            importlib.import_module(name)
        module = _module(target.place)
    except BaseException as error:
        raise LoadError(f"{target.place} does not import: {_one_line(error)}") from error
    function = vars(module).get(target.function)
    if function is None:
        raise LoadError(f"{target.place} has no function {target.function!r}; {_nearest(target.function, module)}")
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise LoadError(f"{target.function!r} in {target.place} is not a plain function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some compiled callables have none; the first call will tell
        return function
    try:
        signature.bind(**dict.fromkeys(KEYWORDS))
    except TypeError as error:
        raise LoadError(
            f"{target.function}{signature} in {target.place} does not take the keywords {', '.join(KEYWORDS)}: {error}"
        ) from error
    return function


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


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """One row: {"score", "extras"}, or {"fault", "message"} with the value of a `records.FaultKind`."""
    try:
        returned = function(**arguments)
        if isinstance(returned, Mapping):
            score, extras = returned.get("score"), {k: v for k, v in returned.items() if k != "score"}
        else:
            score, extras = returned, {}
        if not isinstance(score, numbers.Real):
            return _fault("wrong_type", _wrong_type(returned))
        value = float(score)
        if not math.isfinite(value):
            return _fault("not_finite", f"the score is {value}")
        return {"score": value, "extras": {str(name): _plain(extra) for name, extra in extras.items()}}
    except BaseException as error:  # a reward that calls sys.exit() has raised, too
        return _fault("raised", _one_line(error))


def _wrong_type(returned: object) -> str:
    if isinstance(returned, Mapping):
        return f"the dict must hold a number under 'score'; it is {returned!r}"
    return f"a reward is a number or a dict with one under 'score', not the {type(returned).__name__} {returned!r}"


def _fault(kind: str, message: str) -> dict[str, Any]:
    return {"fault": kind, "message": message[:MESSAGE_CHARACTERS]}


def _plain(value: object) -> object:
    """An extra as JSON can carry it: text stays, numbers become Python's, anything else its repr."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    return repr(value)[:MESSAGE_CHARACTERS]


def _one_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
    return "".join(traceback.format_exception_only(error)).strip() + where


def _bound_cpu(limit_s: float) -> None:
    """Let the kernel end a call that spins on after whoever would have killed it has died."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = used.ru_utime + used.ru_stime + (limit_s + CPU_SLACK_S) * (os.cpu_count() or 1)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(seconds) if hard == resource.RLIM_INFINITY else min(math.ceil(seconds), hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _receive(connection: Connection, calls: queue.SimpleQueue[Mapping[str, Any]]) -> None:
    """Reads calls, and ends the process when the other end is closed, whatever the main thread is doing."""
    status = 1
    try:
        while True:
            calls.put(connection.recv())
    except (EOFError, ConnectionResetError):
        status = 0
    finally:
        os._exit(status)


def main(descriptor: int) -> None:
    """Serve calls on the socket `descriptor`: (Target, limit in seconds) first, then the keywords of each call."""
    connection = Connection(descriptor)
    target, limit_s = connection.recv()
    try:
        function = load_function(target)
    except LoadError as error:
        connection.send_bytes(json.dumps({"load_error": str(error)}).encode())
        return
    connection.send_bytes(json.dumps({"ready": True}).encode())
    calls: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, calls), daemon=True).start()
    while True:
        arguments = calls.get()
        _bound_cpu(limit_s)
        reply = json.dumps(call(function, arguments)).encode()
        sys.stdout.flush()
        connection.send_bytes(reply)


if __name__ == "__main__":
    # Under the real name, so that a `Target` from the other end is an instance of the class used here.
    from hybridflow.rewards.worker import main as serve

    serve(int(sys.argv[1]))
