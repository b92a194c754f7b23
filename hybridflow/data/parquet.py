"""The only module that knows pyarrow: rows of a parquet file as plain Python objects, of all or of one row group."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

# The columns that row_schema reads; others (embeddings) can be large and are left on disk.
COLUMNS = ("data_source", "prompt", "reward_model", "extra_info", "images", "videos")
# Rows made into Python objects at once: a row group may be as large as its file.
ROWS_AT_ONCE = 1024


def parquet_rows(path: Path, columns: Sequence[str] = COLUMNS) -> Iterator[dict[str, Any]]:
    """The rows of `path` in file order, restricted to `columns`. Raises ValueError if it is not a parquet file."""
    with _opened(path) as file:
        yield from _rows(file, range(file.num_row_groups), columns)


def parquet_group_rows(path: Path, group: int, columns: Sequence[str] = COLUMNS) -> Iterator[dict[str, Any]]:
    """The rows of one row group, read as they are asked for."""
    with _opened(path) as file:
        yield from _rows(file, [group], columns)


def parquet_group_sizes(path: Path) -> tuple[int, ...]:
    """Rows of each row group, from the file's end alone. Raises ValueError if it is not a parquet file."""
    with _opened(path) as file:
        return tuple(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))


def _opened(path: Path) -> pyarrow.parquet.ParquetFile:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file: {error}") from error


def _rows(file: pyarrow.parquet.ParquetFile, groups: Sequence[int], columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    known = [name for name in file.schema_arrow.names if name in columns]
    for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=list(groups), columns=known):
        yield from batch.to_pylist()
