"""Turns a batch of columns into records: what a torch `DataLoader` makes of rows, or a table's columns.

`DataLoader` collates equal rows by turning them inside out: numbers become a tensor, a dict of each row one dict of
columns, a list of each row one list of columns. Here they are turned back. Owns that and no schema but `COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

from hybridflow.data.records import PromptRecord
from hybridflow.data.row_schema import parse_row

ARRAY = (torch.Tensor, numpy.ndarray)
COLUMNS = ("prompt", "ground_truth", "reward_model", "data_source", "extra_info")


def records_of_columns(columns: Mapping[str, Any]) -> list[PromptRecord]:
    """A record for each row. A row has a prompt (text or chat messages) and may have data_source, extra_info, and its
    right answer as ground_truth or, as in the schema of files, as reward_model.ground_truth.

    Raises:
        ValueError: no column of prompts, an unknown column, columns that differ in length, or a row that is no record.
    Example: records_of_columns({"prompt": ["2+3=", "1+1="], "ground_truth": torch.tensor([5, 2])})[0].ground_truth
    is "5".
    """
    unknown = [name for name in columns if name not in COLUMNS]
    if "prompt" not in columns or unknown:
        raise ValueError(f"a batch of columns has the columns {list(columns)}; it needs prompt, and may have "
                         f"{', '.join(COLUMNS[1:])}")
    if "ground_truth" in columns and "reward_model" in columns:
        raise ValueError("a batch of columns has both ground_truth and reward_model; leave one out")
    rows = {name: _prompts(column) if name == "prompt" else _rows(column)
            for name, column in columns.items() if not _is_empty(column)}
    lengths = {name: len(column) for name, column in rows.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of a batch differ in length: {lengths}")
    return [_record(dict(zip(rows, values)), f"batch row {place}") for place, values in enumerate(zip(*rows.values()))]


def _record(row: dict[str, Any], origin: str) -> PromptRecord:
    truth = row.pop("ground_truth", "")
    return parse_row({"data_source": "", "reward_model": {"ground_truth": truth}} | row, origin)


def _rows(column: Any) -> list[Any]:
    """One value for each row of a column that was collated or is a plain list."""
    if isinstance(column, Mapping):
        return _inside_out(column)
    if isinstance(column, ARRAY):
        return column.tolist()
    if not isinstance(column, Sequence) or isinstance(column, str):
        raise ValueError(f"a column of a batch is a {type(column).__name__}; it must be a list, a tensor or a dict")
    return [value.tolist() if isinstance(value, ARRAY) else value for value in column]


def _prompts(column: Any) -> list[Any]:
    """As `_rows`, but a list of dicts is one chat of columns: chats of equal length, collated."""
    is_list = isinstance(column, Sequence) and not isinstance(column, str)
    is_chat = is_list and column and all(isinstance(message, Mapping) for message in column)
    return [list(prompt) if isinstance(prompt, tuple) else prompt
            for prompt in (_collated(column) if is_chat else _rows(column))]


def _inside_out(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A dict for each row from a dict of columns, as collating made it of such dicts; empty ones leave no trace."""
    inner = {name: _collated(values) for name, values in columns.items() if not _is_empty(values)}
    lengths = {name: len(values) for name, values in inner.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns in a column of a batch differ in length: {lengths}")
    return [dict(zip(inner, values)) for values in zip(*inner.values())]


def _collated(values: Any) -> list[Any]:
    """One value for each row, where a list of columns was a list in each row."""
    nested = (Mapping, list, tuple, *ARRAY)
    if isinstance(values, list) and values and all(isinstance(value, nested) for value in values):
        return [list(row) for row in zip(*map(_collated, values), strict=True)]
    return _rows(values)


def _is_empty(column: Any) -> bool:
    return isinstance(column, Mapping) and not column
