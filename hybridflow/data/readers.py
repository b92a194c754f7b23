"""Reads prompt files (JSONL or parquet) into PromptRecords.

Owns file formats. The meaning of a row is row_schema's; the files are never written.
"""

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from hybridflow.data.records import PromptRecord
from hybridflow.data.row_schema import parse_row

MARK = b"\xef\xbb\xbf"  # that some editors put in front of a file


class FileFormat(Enum):
    """How the rows of a prompt file are stored."""

    JSONL = "jsonl"
    PARQUET = "parquet"

    @classmethod
    def of(cls, path: str) -> "FileFormat":
        """By the name's ending: .parquet, and JSON lines for every other."""
        return cls.PARQUET if path.endswith(".parquet") else cls.JSONL


def read_prompt_files(paths: list[str], file_format: FileFormat) -> tuple[PromptRecord, ...]:
    """All records of `paths`, in order. Rows are counted from 1 within each file (for JSONL: the line number).

    Raises ValueError naming file, row and key for the first bad row, and FileNotFoundError for a missing file.
    """
    if not paths:
        raise ValueError("no data files were given; give at least one path")
    rows = {FileFormat.JSONL: jsonl_rows, FileFormat.PARQUET: _parquet_rows}[file_format]
    records: list[PromptRecord] = []
    for path in paths:
        before = len(records)
        records.extend(parse_row(row, f"{path} row {number}") for number, row in rows(Path(path)))
        if len(records) == before:
            raise ValueError(f"{path}: has no rows")
    return tuple(records)


def jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, value) of each line that is not empty. Raises ValueError naming a line that is not JSON."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(MARK)
            if line.strip():
                yield number, parse_line(line, f"{path} row {number}")


def parse_line(line: bytes, origin: str) -> Any:
    """The JSON value of a line. Raises ValueError naming `origin`."""
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError) as error:  # among them: no UTF-8, a number of thousands of digits
        raise ValueError(f"{origin}: not JSON: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    # pyarrow takes a third of a second to import, so runs that read no parquet do not pay for it.
    from hybridflow.data.parquet import parquet_rows

    return enumerate(parquet_rows(path), start=1)
