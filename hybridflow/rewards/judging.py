"""Calls a loaded function on rows and says what it gave for each: a score, or a fault by kind. Raises nothing.

What is returned goes to the owner as JSON, so that nothing of the user's is ever unpickled there. Standard library
only.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hybridflow.rewards.loading import KEYWORDS, PLURALS, Loaded, one_line

MESSAGE_CHARACTERS = 400
TEXT_CHARACTERS = 10_000
LARGEST = 1e18  # of a score: its square is a number in fp32 too
Judged = dict[str, Any]
# How libraries say that memory is short without a MemoryError (torch's allocators, on CPU and on a device).
WANT_OF_MEMORY = ("can't allocate memory", "not enough memory", "CUDA out of memory")


def judge(loaded: Loaded, rows: Sequence[Mapping[str, Any]]) -> list[Judged]:
    """Of each row {"score", "extras"}, or {"fault", "message"} with the value of a `records.FaultKind`.

    `rows` are keywords; a function that takes lists is called once with all of them.
    """
    if not loaded.batched:
        return [_guarded(lambda row=row: _judged(_call(loaded, KEYWORDS, row))) for row in rows]
    columns = {plural: [row[name] for row in rows] for plural, name in zip(PLURALS, KEYWORDS)}
    of_call = _guarded(lambda: {"rows": _of_each(_call(loaded, PLURALS, columns), len(rows))})
    return of_call["rows"] if "rows" in of_call else [of_call] * len(rows)


def _call(loaded: Loaded, names: Sequence[str], arguments: Mapping[str, Any]) -> Any:
    if loaded.by_position:
        return loaded.function(*(arguments[name] for name in names))
    return loaded.function(**arguments)


def _guarded(work: Callable[[], Judged]) -> Judged:
    """What `work` gives, or the fault of what it raised."""
    try:
        return work()
    except BaseException as error:  # a reward that calls sys.exit() has raised, too
        return _fault("out_of_memory" if _wants_memory(error) else "raised", _told(error))


def _told(error: BaseException) -> str:
    try:
        return one_line(error)
    except BaseException:  # an error whose own text raises
        return type(error).__name__


def _wants_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in _told(error) for words in WANT_OF_MEMORY)


def _of_each(returned: Any, num_rows: int) -> list[Judged]:
    """A batched function's rows: of whatever holds one entry a row."""
    if isinstance(returned, (str, bytes, Mapping)) or not isinstance(returned, Iterable):
        return [_fault("wrong_type", f"rewards of {num_rows} rows are a list, not {_shown(returned)}")] * num_rows
    entries = list(returned)
    if len(entries) != num_rows:
        return [_fault("wrong_type", f"{len(entries)} rewards were returned for {num_rows} rows")] * num_rows
    return [_guarded(lambda entry=entry: _judged(entry)) for entry in entries]


def _judged(returned: Any) -> Judged:
    if isinstance(returned, Mapping):
        score, extras = returned.get("score"), {k: v for k, v in returned.items() if k != "score"}
    else:
        score, extras = returned, {}
    number = _number(score)
    if number is None:
        return _fault("wrong_type", _wrong_type(returned))
    value = _as_float(number)
    if not abs(value) <= LARGEST:
        return _fault("not_finite", f"the score is {value}" + (f", beyond {LARGEST}" if math.isfinite(value) else ""))
    return {"score": value, "extras": {str(name): _plain(extra) for name, extra in extras.items()}}


def _number(value: Any) -> numbers.Real | None:
    """A real number as it stands or as the one entry of an array or tensor without dimensions; None for all else.

    Complex numbers, texts and lists of one are no scores: what was meant by them cannot be known.
    """
    if isinstance(value, numbers.Real):
        return value
    scalar = getattr(type(value), "item", None) is not None and getattr(value, "ndim", None) == 0
    inner = value.item() if scalar else None
    return inner if isinstance(inner, numbers.Real) else None


def _as_float(number: numbers.Real) -> float:
    """Whole numbers beyond the range of floats are infinite."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _wrong_type(returned: Any) -> str:
    if isinstance(returned, Mapping):
        return f"the dict must hold a number under 'score'; it is {returned!r}"
    return f"a reward is a number or a dict with one under 'score', not {_shown(returned)}"


def _shown(value: Any) -> str:
    return f"the {type(value).__name__} {value!r}"


def _fault(kind: str, message: str) -> Judged:
    return {"fault": kind, "message": message[:MESSAGE_CHARACTERS]}


def _plain(value: Any) -> object:
    """An extra as JSON can carry it: texts and numbers (also in arrays without dimensions), of anything else its repr.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value[:TEXT_CHARACTERS]
    number = _number(value)
    if number is None:
        return repr(value)[:MESSAGE_CHARACTERS]
    return int(number) if isinstance(number, numbers.Integral) else float(number)
