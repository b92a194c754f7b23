"""Data files that are read row by row as rows are needed: where the rows lie, and a reader that goes from row to row.

Owns offsets and row groups, which is all of a file that stays in memory (8 bytes a line, one number a row group). What
a row means is `row_schema`'s, in which order rows are visited `stream_order`'s.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from hybridflow.data.readers import MARK, FileFormat, parse_line

# Consecutive lines that are visited together: the unit in which the order of a JSON lines file is shuffled.
LINES_OF_BLOCK = 256
# Bytes at either end of a file that its mark is made of.
MARKED_BYTES = 1 << 16


class RowFile(Protocol):
    """Rows 0 to num_rows - 1, in blocks of consecutive rows.

    Attributes:
        blocks: rows of each block.
    """

    path: Path
    blocks: tuple[int, ...]

    def open_at(self, block: int, row: int) -> Iterator[Any]:
        """The block's rows from its `row`-th on, read as they are asked for; each as `parsed` takes it."""
        ...

    def parsed(self, raw: Any, row: int) -> tuple[Any, str]:
        """A row as plain Python objects, and its origin for messages. Raises ValueError where it cannot be read."""
        ...


class JsonLines:
    """JSON lines; empty ones are no rows. The file is gone through once, to find where its lines begin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offsets = array("Q")
        self.blanks: list[int] = []  # rows before each empty line
        with path.open("rb") as file:
            offset = 0
            for line in file:
                if line.removeprefix(MARK if not offset else b"").strip():
                    self.offsets.append(offset)
                else:
                    self.blanks.append(len(self.offsets))
                offset += len(line)
        count = len(self.offsets)
        self.blocks = tuple(min(LINES_OF_BLOCK, count - start) for start in range(0, count, LINES_OF_BLOCK))

    def open_at(self, block: int, row: int) -> Iterator[bytes]:
        first = block * LINES_OF_BLOCK
        with self.path.open("rb") as file:
            file.seek(self.offsets[first + row])
            yield from islice(_filled(file), self.blocks[block] - row)

    def parsed(self, raw: bytes, row: int) -> tuple[Any, str]:
        origin = f"{self.path} row {row + 1 + bisect_right(self.blanks, row)}"
        return parse_line(raw.removeprefix(MARK if row == 0 else b""), origin), origin


class ParquetGroups:
    """The row groups of a parquet file. A row in the middle of one is reached by reading what is before it."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError if it is not a parquet file."""
        from hybridflow.data.parquet import parquet_group_sizes  # see readers

        self.path = path
        sizes = enumerate(parquet_group_sizes(path))
        self.groups, self.blocks = zip(*[(group, size) for group, size in sizes if size]) or ((), ())

    def open_at(self, block: int, row: int) -> Iterator[dict[str, Any]]:
        from hybridflow.data.parquet import parquet_group_rows

        yield from islice(parquet_group_rows(self.path, self.groups[block]), row, None)

    def parsed(self, raw: dict[str, Any], row: int) -> tuple[Any, str]:
        return raw, f"{self.path} row {row + 1}"


class RowFiles:
    """Several files as one: rows are counted through all of them, and blocks too."""

    def __init__(self, files: Sequence[RowFile]) -> None:
        self.files = tuple(files)
        self.blocks = tuple(size for file in files for size in file.blocks)

    @classmethod
    def open(cls, paths: Sequence[str], file_format: FileFormat | None = None) -> RowFiles:
        """`file_format`: of all files; None goes by their names. Raises ValueError for a file without rows, or one that
        is not of its format.
        """
        files = [_open(path, file_format or FileFormat.of(path)) for path in paths]
        for file in files:
            if not file.blocks:
                raise ValueError(f"{file.path}: has no rows")
        return cls(files)

    @cached_property
    def block_starts(self) -> tuple[int, ...]:
        """The first row of each block, and the number of rows."""
        return (0, *accumulate(self.blocks))

    @property
    def num_rows(self) -> int:
        return self.block_starts[-1]

    @cached_property
    def place_of_block(self) -> tuple[tuple[RowFile, int, int], ...]:
        """For each block its file, its number in there, and the file's first row."""
        firsts = [0, *accumulate(sum(file.blocks) for file in self.files)]
        return tuple((file, number, first) for file, first in zip(self.files, firsts)
                     for number in range(len(file.blocks)))

    def mark(self) -> list[list[Any]]:
        """What ranks compare instead of the rows: size, rows and a digest of both ends of each file."""
        return [[file.path.stat().st_size, sum(file.blocks), _digest_of_ends(file.path)] for file in self.files]


class RowReader:
    """Reads rows in whatever order; next to nothing is read twice where the order goes forward within blocks."""

    def __init__(self, files: RowFiles) -> None:
        self.files = files
        self._rows: Iterator[Any] = iter(())
        self._next = -1  # the row that _rows gives next
        self._end = -1  # the first row behind its block

    def raw(self, row: int) -> Any:
        """A row as its file has it."""
        if not self._next <= row < self._end:
            block = bisect_right(self.files.block_starts, row) - 1
            file, number, _ = self.files.place_of_block[block]
            self._rows = file.open_at(number, row - self.files.block_starts[block])
            self._next, self._end = row, self.files.block_starts[block + 1]
        raw = next(islice(self._rows, row - self._next, None))
        self._next = row + 1
        return raw

    def parsed(self, raw: Any, row: int) -> tuple[Any, str]:
        """See `RowFile.parsed`; `row` is counted through all files."""
        file, _, first = self.files.place_of_block[bisect_right(self.files.block_starts, row) - 1]
        return file.parsed(raw, row - first)


def _open(path: str, file_format: FileFormat) -> RowFile:
    return ParquetGroups(Path(path)) if file_format is FileFormat.PARQUET else JsonLines(Path(path))


def _filled(file: BinaryIO) -> Iterator[bytes]:
    return (line for line in file if line.strip())


def _digest_of_ends(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        digest.update(file.read(MARKED_BYTES))
        file.seek(max(0, path.stat().st_size - MARKED_BYTES))
        digest.update(file.read(MARKED_BYTES))
    return digest.hexdigest()
