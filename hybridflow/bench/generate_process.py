"""The parent's end of a contestant: a process that keeps a model and answers one call after another.

Owns its start, its environment and its end. What it says of itself is in a file, which is shown where it fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import hybridflow

SHOWN = 2000  # characters of what a contestant that failed had to say


class ContestantError(RuntimeError):
    """A contestant ended before it answered. The message has the last lines of what it said."""


@dataclass(frozen=True)
class Answer:
    """Of one call.

    Attributes:
        wall, cpu: seconds inside the contestant; CPU seconds of all its threads.
    """

    value: Any
    wall: float
    cpu: float


class ContestantProcess:
    """Use as a context manager. Example: `with ContestantProcess("ours", folder, "fp32", 2) as ours: ours.call(...)`.

    Attributes:
        name: as `generate_worker.CLASSES` has it.
    """

    def __init__(self, name: str, folder: Path, precision: str, threads: int, python: str = sys.executable) -> None:
        """Start it; `ready` waits for it, so that several can load at once."""
        self.name = name
        self._said = tempfile.TemporaryFile("w+")
        words = ("-m", "hybridflow.bench.generate_worker", name, str(folder), precision, str(threads))
        self._process = subprocess.Popen((python, *words), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=self._said, env=_environment(threads), text=True)

    def __enter__(self) -> ContestantProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._said.close()

    def ready(self) -> None:
        """Wait until its model is loaded.

        Raises:
            ContestantError: it ended instead.
        """
        self._answer()

    def call(self, method: str, *args: Any) -> Answer:
        """Call a method of the contestant.

        Raises:
            ContestantError: it ended instead.
        """
        self._process.stdin.write(json.dumps({"call": method, "args": args}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return Answer(answer["value"], answer["wall"], answer["cpu"])

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._process.wait()
        self._said.seek(0)
        raise ContestantError(f"{self.name} ended with exit code {self._process.returncode}:\n"
                              f"{self._said.read()[-SHOWN:]}")


def _environment(threads: int) -> dict[str, str]:
    root = str(Path(hybridflow.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONPATH": path,
                         "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
