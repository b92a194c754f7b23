"""What the type of a key says: whether it is a block, a list, a word of an Enum, and how to call it to a person.

Looks at types only, never at values.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hybridflow.config.faults import listed

NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


def field_types(cls: type) -> dict[str, Any]:
    """The type of each field of a dataclass."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def block_of(hint: Any) -> type | None:
    """The dataclass of a block, of an optional block, or of the elements of a list of blocks; else None."""
    member = members(hint)[0]
    element = get_args(member)[0] if get_origin(member) is list else member
    return element if is_dataclass(element) else None


def words_of(hint: Any) -> type[Enum] | None:
    """The Enum whose words a key takes; None for a key of another type."""
    member = members(hint)[0]
    return member if isinstance(member, type) and issubclass(member, Enum) else None


def is_list(hint: Any) -> bool:
    """Whether a key takes a list."""
    return get_origin(members(hint)[0]) is list


def members(hint: Any) -> tuple[Any, ...]:
    """The types of a union but None; the type itself where it is no union."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(member for member in get_args(hint) if member is not type(None))
    return (hint,)


def described(hint: Any) -> str:
    """A type in words: "an integer or null"."""
    words = words_of(hint)
    if words is not None:
        parts = [str(member.value) for member in words]
    else:
        parts = [f"a list, each {described(get_args(member)[0])}" if get_origin(member) is list
                 else NAMES.get(member, "a block of keys") for member in members(hint)]
    return listed(parts + (["null"] if type(None) in get_args(hint) else []))
