"""Which tool a turn of the model calls: the built-in forms of a call, and the strings that end one.

Pure functions of text. Standard library only: the workers of tools import it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

# Name and arguments of a call: by keyword, or one text.
Call = tuple[str, Mapping[str, Any] | str]
Detector = Callable[[str], Call | None]
TAGS, JSON = ("<tool>", "</tool>"), ("<tool_call>", "</tool_call>")


def call_in_tags(text: str) -> Call | None:
    """The call in the last `<tool>name: argument</tool>` of a turn; None without one.

    Example: `call_in_tags("Let me see. <tool>add: 2 3</tool>") == ("add", "2 3")`.

    Raises:
        ValueError: there is no colon behind the name.
    """
    inner = _inside(text, TAGS)
    if inner is None:
        return None
    name, colon, argument = inner.partition(":")
    if not colon:
        raise ValueError(f"a call is <tool>name: argument</tool>, not <tool>{inner}</tool>")
    return name.strip(), argument.strip()


def call_in_json(text: str) -> Call | None:
    """The call in the last `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` of a turn; None without one.

    Raises:
        ValueError: what stands there is not such an object.
    """
    inner = _inside(text, JSON)
    if inner is None:
        return None
    try:
        found = json.loads(inner)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the call is not JSON: {error}") from None
    if (not isinstance(found, dict) or not isinstance(found.get("name"), str)
            or not isinstance(found.get("arguments", {}), dict)):
        raise ValueError('a call is {"name": "...", "arguments": {...}}')
    return found["name"], found.get("arguments", {})


BUILT_IN: dict[str, Detector] = {"tags": call_in_tags, "json": call_in_json}
ENDS = {"tags": TAGS[1], "json": JSON[1]}


def call_ends(detector: str) -> tuple[str, ...]:
    """The strings with which a call of a built-in form ends, and so the turn; of a user's form generation.stop says it.
    """
    return (ENDS[detector],) if detector in ENDS else ()


def may_call(detector: str, text: str) -> bool:
    """False only where a detector of this name finds nothing in `text`: nobody has to ask it."""
    return all(end in text for end in call_ends(detector))


def _inside(text: str, tags: tuple[str, str]) -> str | None:
    """What stands in the last pair of tags."""
    end = text.rfind(tags[1])
    start = text.rfind(tags[0], 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len(tags[0]):end]
