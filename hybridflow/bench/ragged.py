"""`bench ragged`: continuous against static batching where most responses are short and a few are long.

One engine does both: at once all prompts, of which as many as it has rows decode together and a new one takes each free
row; or as many prompts a call as it has rows, and the next call when the longest has ended. What the lengths predict is
the number of rows in each step, counted, times what a step of so many rows costs, measured alone in the same rounds:
steps alone would predict too much, since a step of few rows is cheaper. On one thread, in CPU seconds, which stand for
the time of a core that does nothing else.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hybridflow.bench.generate_case import MODELS, Cell, Precision, prompts, write_model
from hybridflow.bench.generate_process import ContestantProcess
from hybridflow.observe.table import table

MAX_ROWS = 16
SHORT, LONG = 16, 192  # new tokens
PROMPTS, LONG_EVERY = 160, 10
CALIBRATED = (1, 2, 4, 8, MAX_ROWS)  # rows, of which a step's cost is measured
STEPS = 64  # of one measurement
ROUNDS = 3
LEAST_OF_PREDICTED = 0.9


@dataclass(frozen=True)
class Costs:
    """Seconds of a step by its rows, and of taking one prompt in, its first token included."""

    steps: Mapping[int, float]
    prompt: float

    def step(self, rows: int) -> float:
        """Between measured numbers of rows, along a line."""
        if not rows:
            return 0.0
        low = max(size for size in self.steps if size <= rows)
        high = min(size for size in self.steps if size >= rows)
        share = (rows - low) / (high - low) if high > low else 0.0
        return self.steps[low] + share * (self.steps[high] - self.steps[low])


def main() -> int:
    """Measure and print. Returns 1 where continuous batching gains less than it should."""
    print("Some two minutes ...", file=sys.stderr, flush=True)
    config = MODELS["tiny"]
    with tempfile.TemporaryDirectory() as folder:
        write_model(config, Path(folder), Precision.FP32)
        with ContestantProcess("ours", Path(folder), Precision.FP32.value, threads=1) as engine:
            engine.ready()
            engine.call("limit_rows", MAX_ROWS)
            asked = sorted(prompts(Cell("tiny", Precision.FP32, PROMPTS), 0))  # the order that the engine takes them in
            seconds = measure(engine, asked, drawn_lengths())
    gain = median(static / continuous for static, continuous in zip(seconds["static"], seconds["continuous"]))
    expected = predicted(drawn_lengths(), calibrated({name: median(of) for name, of in seconds.items()}))
    rows = [(name, f"{median(seconds[name]):.2f}", f"{min(seconds[name]):.2f}") for name in ("continuous", "static")]
    print(table(("batching", "median CPU s", "least"), rows))
    print(f"{PROMPTS} prompts, {SHORT} new tokens each, one in {LONG_EVERY} of them {LONG}; {MAX_ROWS} rows; {ROUNDS} "
          f"rounds in turns. Continuous batching gains {gain:.2f}x, the lengths predict {expected:.2f}x.")
    if gain < LEAST_OF_PREDICTED * expected:
        print(f"That is less than {LEAST_OF_PREDICTED} of what they predict")
        return 1
    return 0


def drawn_lengths() -> list[int]:
    """New tokens of each prompt, long ones anywhere."""
    lengths = [LONG if i % LONG_EVERY == 0 else SHORT for i in range(PROMPTS)]
    random.Random(0).shuffle(lengths)
    return lengths


def measure(engine: ContestantProcess, asked: list[list[int]], lengths: list[int]) -> dict[str, list[float]]:
    """CPU seconds of each round: both ways of batching, and calls of `rows` prompts, a token or STEPS + 1 each."""
    ways: dict[str, Callable[[], tuple]] = {
        "continuous": lambda: (asked, lengths, PROMPTS, 0),
        "static": lambda: (asked, lengths, MAX_ROWS, 0),
    }
    for rows in CALIBRATED:
        for new in (1, STEPS + 1):
            ways[f"{rows} rows, {new} tokens"] = lambda rows=rows, new=new: (asked[:rows], [new] * rows, rows, 0)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, arguments in ways.items():
            taken = engine.call("ragged", *arguments())
            if number:  # the first one warms up
                seconds[name].append(taken.cpu)
    return seconds


def calibrated(seconds: Mapping[str, float]) -> Costs:
    """From what calls of some rows took."""
    first = {rows: seconds[f"{rows} rows, 1 tokens"] for rows in CALIBRATED}
    steps = {rows: (seconds[f"{rows} rows, {STEPS + 1} tokens"] - first[rows]) / STEPS for rows in CALIBRATED}
    return Costs(steps, first[MAX_ROWS] / MAX_ROWS)


def predicted(lengths: Sequence[int], costs: Costs) -> float:
    """How many times as long static batching takes."""
    static = sum(run_seconds(lengths[start : start + MAX_ROWS], costs) for start in range(0, len(lengths), MAX_ROWS))
    return static / run_seconds(lengths, costs)


def run_seconds(lengths: Sequence[int], costs: Costs, max_rows: int = MAX_ROWS) -> float:
    """Of one call: a prompt enters beside the decoding rows as soon as one is free, and draws its first token then.

    Example: of two rows, lengths 2, 3, 2 take 4 steps: prompts 1 and 2, both decode, 2 decodes and prompt 3, 3 decodes.
    """
    waiting, running, seconds = list(reversed(lengths)), [], 0.0
    while waiting or running:
        entering = [waiting.pop() for _ in range(min(max_rows - len(running), len(waiting)))]
        seconds += costs.step(len(running)) + costs.prompt * len(entering)
        running = [left - 1 for left in (*running, *entering) if left > 1]
    return seconds
