"""The only module that knows pyarrow: rows of a parquet file as plain Python objects."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

# The columns that row_schema reads; others (images, embeddings) can be large and are left on disk.
COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")


def parquet_rows(path: Path, wanted: Sequence[str] = COLUMNS) -> Iterator[dict[str, Any]]:
    """The rows of `path` in file order, the `wanted` columns alone. Raises ValueError if it is not a parquet file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file: {error}") from error
    with file:
        columns = [name for name in file.schema_arrow.names if name in wanted]
        for batch in file.iter_batches(columns=columns):
            yield from batch.to_pylist()
