"""The function that a config names: one of the tables in `registry`, or file.py:function of the user's own.

The only module of `algorithms` that runs a user's file. A name that cannot be used is a ValueError that says why; it is
asked for before ranks meet.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridflow.algorithms.advantages import Estimator
from hybridflow.algorithms.policy import PolicyLoss
from hybridflow.algorithms.registry import ADVANTAGES, POLICY_LOSSES, AdvantageEntry, PolicyLossEntry
from hybridflow.algorithms.trial import try_estimator, try_loss
from hybridflow.algorithms.users_own import UsersEstimator, UsersLoss

ESTIMATOR_ARGUMENTS = ("rewarded", "options")
LOSS_ARGUMENTS = ("log_probs", "columns", "rows", "clip")


def find_estimator(spec: str) -> Estimator:
    """The advantage estimator that algorithm.advantage names; what a user's returns is looked at.

    Raises:
        ValueError: `spec` is neither in the table nor file.py:function; or the file is missing or does not import, or
            the function is missing (with the nearest name), takes other arguments, or returns on an example what it
            must not.
    """
    if spec in ADVANTAGES:
        return _ours(ADVANTAGES[spec])
    key = "algorithm.advantage"
    estimator = UsersEstimator(f"{key} = {spec}", _users(key, spec, ADVANTAGES, ESTIMATOR_ARGUMENTS))
    try_estimator(estimator)
    return estimator


def find_policy_loss(spec: str) -> PolicyLoss:
    """The policy loss that algorithm.policy_loss names, a user's likewise. Raises as `find_estimator`."""
    if spec in POLICY_LOSSES:
        return _ours(POLICY_LOSSES[spec])
    key = "algorithm.policy_loss"
    loss = UsersLoss(f"{key} = {spec}", _users(key, spec, POLICY_LOSSES, LOSS_ARGUMENTS))
    try_loss(loss)
    return loss


def _ours(entry: AdvantageEntry | PolicyLossEntry) -> Callable[..., Any]:
    return vars(importlib.import_module(f"hybridflow.algorithms.{entry.module}"))[entry.function]


def _users(key: str, spec: str, names: Iterable[str], arguments: tuple[str, ...]) -> Callable[..., Any]:
    place, _, name = spec.rpartition(":")
    if not place.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{key} = {spec}: is neither file.py:function nor one of {', '.join(names)}")
    function = _from_file(key, spec, Path(place), name)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ValueError(f"{key} = {spec}: {name}{inspect.signature(function)} cannot be called with "
                         f"({', '.join(arguments)}): {error}") from None
    return function


def _from_file(key: str, spec: str, path: Path, name: str) -> Callable[..., Any]:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"{key} = {spec}: there is no file {path}")
    try:
        module = _run(path)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{key} = {spec}: {path} does not import: {type(error).__name__}: {error}") from error
    function = vars(module).get(name)
    if not inspect.isroutine(function):
        functions = [known for known, value in vars(module).items() if inspect.isroutine(value)]
        near = difflib.get_close_matches(name, functions, n=1)
        what = "is no function" if name in vars(module) else "is not there"
        raise ValueError(f"{key} = {spec}: {name} {what} in {path}" + (f"; did you mean {near[0]}?" if near else ""))
    return function


def _run(path: Path) -> ModuleType:
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # its neighbours can be imported; last, so that none hides a library
    spec = importlib.util.spec_from_file_location(f"algorithm_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look a class's module up
    spec.loader.exec_module(module)
    return module
