"""The table of all keys: dotted name, default and meaning, read from the schema's own lines.

The meaning of a key is the text under it in `schema` and `model_schema`; nothing is written twice.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any

from hybridflow.config.faults import shown
from hybridflow.config.hints import block_of, field_types
from hybridflow.config.model_schema import LayoutConfig
from hybridflow.config.reward_schema import OnFaultConfig
from hybridflow.config.schema import Config

# Blocks whose keys are shown where they have defaults, under train.layout and reward.on_fault.
SHOWN_ONCE = (LayoutConfig, OnFaultConfig)


@dataclass(frozen=True)
class KeyLine:
    """One key. `default` is written as in YAML; "" for a block, whose keys have their own."""

    key: str
    default: str
    meaning: str


def key_lines(cls: type = Config, prefix: str = "") -> Iterator[KeyLine]:
    """Every key in the order of the schema, each block before its keys; elements of a list are written key[]."""
    meanings, types = field_meanings(cls), field_types(cls)
    for field in fields(cls):
        key, block = f"{prefix}{field.name}", block_of(types[field.name])
        default = default_of(field)
        yield KeyLine(key, "" if is_dataclass(default) else shown(default), meanings[field.name])
        if block is not None and not (block in SHOWN_ONCE and default is None):
            yield from key_lines(block, f"{key}[]." if isinstance(default, list) else f"{key}.")


def field_meanings(cls: type) -> dict[str, str]:
    """The text under each field of a dataclass.

    Raises:
        ValueError: a field has none.
    """
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for line, below in zip(body.body, [*body.body[1:], None]):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
                raise ValueError(f"{cls.__name__}.{line.target.id} has no line of meaning under it")
            found[line.target.id] = str(below.value.value)
    return found


def default_of(field: Field[Any]) -> Any:
    """The default of a field, made if it is made anew for each config."""
    return field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]


def key_table() -> str:
    """The keys as text for a terminal: key = default, and the meaning under it."""
    return "\n".join(f"{line.key}{f' = {line.default}' if line.default else ''}\n    {line.meaning}"
                     for line in key_lines())


def markdown_table() -> str:
    """The keys as the table of README.md; blocks are left out."""
    rows = [f"| `{line.key}` | `{line.default}` | {line.meaning.replace('|', chr(92) + '|')} |"
            for line in key_lines() if line.default]
    return "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows])
