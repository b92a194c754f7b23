"""Files of one JSON object a line: written line by line, continued after a restart, read back.

Owns the file format of metrics.jsonl and samples.jsonl. It knows nothing of what the records mean.
"""

from __future__ import annotations

import json
from pathlib import Path


class JsonlFile:
    """A file that is readable up to the last full line at any moment, also after a crash."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Continue `path` if `resume`; otherwise begin it anew and keep what was there as `<stem>.previous.jsonl`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and resume:
            _drop_torn_line(path)
        elif path.exists():
            path.replace(path.with_suffix(".previous.jsonl"))
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, object]) -> None:
        """Append one record and flush it.

        Raises:
            ValueError: a number is not finite (JSON has no NaN).
        """
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, object]]:
    """The records of a file that may still be written to: a last line without its end is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def _drop_torn_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
