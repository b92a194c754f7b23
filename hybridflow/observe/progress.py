"""How far the run is: a live bar on a terminal, a line for each step elsewhere.

Owns what is printed while training. It reads metrics and never logs them.
"""

from __future__ import annotations

import statistics
from collections import deque
from enum import Enum
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from hybridflow.parallel.arithmetic import ceil_div

# Steps that the time left is judged by: enough to smooth one slow step, few enough to follow growing responses.
RECENT_STEPS = 20
PLAIN_WIDTH = 120
MAX_LINES = 50
# Below this many columns the bar itself shrinks, so that the numbers keep their place.
WIDE_TERMINAL = 110


class ProgressStyle(Enum):
    """`BAR` is live and needs a terminal, `LINES` is for CI logs, `NONE` prints nothing for a step."""

    BAR = "bar"
    LINES = "lines"
    NONE = "none"


def choose_style(*, rank: int, wanted: bool, is_terminal: bool) -> ProgressStyle:
    """Rank 0 shows progress if `wanted` (logging.progress), the others never do."""
    if rank > 0 or not wanted:
        return ProgressStyle.NONE
    return ProgressStyle.BAR if is_terminal else ProgressStyle.LINES


class Progress(Protocol):
    """Takes note of finished steps."""

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Step `step` (the first is 1) is done, with these metrics; what is not among them is shown as "-"."""

    def close(self) -> None:
        """Leave the terminal as it was found."""


def open_progress(style: ProgressStyle, total_steps: int, console: Console, first_step: int = 1) -> Progress:
    """The progress display of `style`. `first_step` is above 1 in a resumed run."""
    match style:
        case ProgressStyle.BAR:
            return BarProgress(total_steps, console, first_step)
        case ProgressStyle.LINES:
            return LineProgress(total_steps, console)
        case ProgressStyle.NONE:
            return NoProgress()


def open_console() -> Console:
    """A console on standard output; without a terminal it is wide enough for our tables and rows."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


class NoProgress:
    """Shows nothing."""

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing to clean up."""


class LineProgress:
    """Rows of text for logs: one for each step of a short run, some 50 of a long one, and all that were evaluated."""

    def __init__(self, total_steps: int, console: Console) -> None:
        self._total_steps = total_steps
        self._console = console
        self._pace = Pace()
        self._every = ceil_div(total_steps, MAX_LINES)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Print the row where it is this step's turn."""
        self._pace.add(metrics)
        is_turn = step % self._every == 0 or step in (1, self._total_steps)
        if not is_turn and not any(name.startswith("eval/") for name in metrics):
            return
        parts = [f"step {step}/{self._total_steps}", *cells(metrics), self._pace.left(self._total_steps - step)]
        self._console.print(Text(" | ".join(part for part in parts if part)), soft_wrap=True)

    def close(self) -> None:
        """Nothing to clean up."""


class BarProgress:
    """A live bar. What others print to the same console appears above it."""

    def __init__(self, total_steps: int, console: Console, first_step: int) -> None:
        self._total_steps = total_steps
        self._pace = Pace()
        self._bar = RichProgress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=24 if console.width >= WIDE_TERMINAL else 5),
            TextColumn("{task.fields[cells]}", markup=False),
            TextColumn("{task.fields[left]}", style="dim", markup=False),
            console=console,
        )
        self._task: TaskID = self._bar.add_task("", total=total_steps, completed=first_step - 1, cells="", left="")
        self._bar.start()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Move the bar."""
        self._pace.add(metrics)
        left = self._pace.left(self._total_steps - step)
        self._bar.update(self._task, completed=step, cells="  ".join(cells(metrics)), left=left)

    def close(self) -> None:
        """Leave the last state of the bar in the scroll-back."""
        self._bar.stop()


class Pace:
    """Judges the time left by the median of recent steps."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)

    def add(self, metrics: dict[str, float]) -> None:
        """Note the step's time, if it was measured."""
        if "time/step" in metrics:
            self._seconds.append(metrics["time/step"])

    def left(self, num_steps: int) -> str:
        """Words for the time that `num_steps` more steps take; empty when none is left or none was measured."""
        if num_steps <= 0 or not self._seconds:
            return ""
        return f"{duration(num_steps * statistics.median(self._seconds))} left"


def cells(metrics: dict[str, float]) -> list[str]:
    """What is shown of a step. Example: `["1.84 s", "reward 0.412", "KL 0.0031", "5,120 tokens/s"]`.

    KL is that to the reference, and is left out where the run has none. A supervised step, and one of preferences, has
    a loss in place of reward and KL.
    """
    given = [name for name in ("sft/loss", "preference/loss") if name in metrics]
    if given:
        learned = [_cell(metrics, given[0], "loss {:.4f}")]
    else:
        learned = [_cell(metrics, "reward/mean", "reward {:.3f}")]
        if "policy/kl_reference" in metrics:
            learned.append(_cell(metrics, "policy/kl_reference", "KL {:.4f}"))
    speed = _cell(metrics, "perf/tokens_per_second", "{:,.0f} tokens/s")
    shown = [_cell(metrics, "time/step", "{:.2f} s"), *learned, speed]
    if "eval/preference_accuracy" in metrics:
        shown.append(_cell(metrics, "eval/preference_accuracy", "held-out preference accuracy {:.3f}"))
    if "eval/accuracy" in metrics:
        shown.append(_cell(metrics, "eval/accuracy", "held-out accuracy {:.3f}"))
    return shown


def duration(seconds: float) -> str:
    """Words for a time. Examples: "45 s", "6 min 12 s", "3 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _cell(metrics: dict[str, float], name: str, shape: str) -> str:
    if name not in metrics:
        words = shape.split(" ")
        return " ".join("-" if "{" in word else word for word in words)
    return shape.format(metrics[name])
