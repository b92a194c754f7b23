"""Rollouts to look at: a table on the console and samples.jsonl.

Owns how a model's text is shown. A model may write anything, so nothing of its text reaches the terminal unescaped.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridflow.observe.jsonl import JsonlFile

# Characters shown of a text in the table; samples.jsonl has all of it.
SHOWN_CHARACTERS = 160

# Control, format (bidirectional overrides, zero-width), surrogate, private use, line and paragraph separators.
_UNSHOWABLE = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})


@dataclass(frozen=True)
class RolloutSample:
    """One rollout in words. Example: `RolloutSample("2+2=", "4", "4", 1.0)`.

    `truth` is None where the task has no expected answer. `reward` is NaN where the reward function failed.
    """

    prompt: str
    response: str
    truth: str | None
    reward: float


class SampleLog:
    """Shows sample rollouts and keeps them."""

    def __init__(self, path: Path, console: Console, *, resume: bool) -> None:
        """Append to `path` if `resume`, else begin anew (see `JsonlFile`)."""
        self._file = JsonlFile(path, resume=resume)
        self._console = console

    def take(self, step: int, samples: Sequence[RolloutSample], *, shown: bool = True) -> None:
        """Append every sample, whole, to the file, and print the table if `shown`. No samples: nothing happens."""
        if samples and shown:
            self._console.print(sample_table(step, samples))
        for sample in samples:
            reward = sample.reward if math.isfinite(sample.reward) else None
            self._file.write({"step": step, **asdict(sample), "reward": reward})

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def sample_table(step: int, samples: Sequence[RolloutSample]) -> Table:
    """The samples as a table; long texts lose their middle."""
    table = Table(title=f"Rollouts of step {step}", title_justify="left", title_style="bold", show_lines=True)
    table.add_column("prompt", ratio=4, overflow="fold")
    table.add_column("response", ratio=4, overflow="fold")
    table.add_column("truth", ratio=2, overflow="fold")
    table.add_column("reward", justify="right", min_width=6)
    for sample in samples:
        truth = "-" if sample.truth is None else shown(sample.truth)
        # Text objects: rich reads no markup in them.
        table.add_row(*(Text(cell) for cell in (shown(sample.prompt), shown(sample.response), truth)),
                      Text(f"{sample.reward:.3g}"))
    return table


def shown(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """`text` safe to print, on one line, at most about `limit` characters. Example: `shown("a\\nb") == r"a\\nb"`."""
    return escaped(elided(text, limit))


def elided(text: str, limit: int) -> str:
    """`text`, its middle replaced by the number of characters left out where it is longer than `limit`.

    The end is kept because answers stand there.
    """
    if len(text) <= limit:
        return text
    head = limit * 2 // 5
    tail = limit - head
    return f"{text[:head]} [... {len(text) - limit} characters ...] {text[-tail:]}"


def escaped(text: str) -> str:
    """`text` with every character that a terminal could act on written as its Python escape."""
    return "".join(_escape(c) if unicodedata.category(c) in _UNSHOWABLE else c for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
