"""`bench ragged`: continuous against static batching where most responses are short and a few are long.

One engine does both: at once all prompts, of which as many as it has rows decode together and a new one takes each free
row; or as many prompts a call as it has rows, and the next call when the longest has ended. What the lengths predict is
the number of rows in each step, counted, times what a step of so many rows costs, measured alone in the same rounds:
steps alone would predict too much, since a step of few rows is cheaper. On one thread, in CPU seconds, which stand for
the time of a core that does nothing else; what a neighbour of that core slows, it slows in all parts of a round.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hybridflow.bench.generate_case import MODELS, Cell, Precision, prompts, write_model
from hybridflow.bench.generate_process import ContestantProcess
from hybridflow.observe.table import table

MAX_ROWS = 16
SHORT, LONG = 16, 192  # new tokens
PROMPTS, LONG_EVERY = 160, 10
CALIBRATED = (1, 2, 4, 8, 12, MAX_ROWS)  # rows, of which a step's cost is measured
STEPS = 116  # of one measurement: contexts are then on average as long as in the runs
ROUNDS = 7
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
    print("About a minute ...", file=sys.stderr, flush=True)
    config, lengths = MODELS["tiny"], drawn_lengths()
    with tempfile.TemporaryDirectory() as folder:
        write_model(config, Path(folder), Precision.FP32)
        with ContestantProcess("ours", Path(folder), Precision.FP32.value, threads=1) as engine:
            engine.ready()
            engine.call("limit_rows", MAX_ROWS)
            asked = sorted(prompts(Cell("tiny", Precision.FP32, PROMPTS), 0))  # as the engine takes them in
            rounds = measure(engine, asked, lengths)
    costs = [calibrated(seconds) for seconds in rounds]
    taken = [(seconds["continuous"], seconds["static"]) for seconds in rounds]
    foretold = [(run_seconds(lengths, of), static_seconds(lengths, of)) for of in costs]
    rows = [(name, *(f"{median(pair[i] for pair in pairs):.2f}" for pairs in (taken, foretold)))
            for i, name in enumerate(("continuous", "static"))]
    print(table(("batching", "CPU s", "predicted"), rows))
    gain, expected = (median(static / continuous for continuous, static in pairs) for pairs in (taken, foretold))
    print(f"{PROMPTS} prompts, {SHORT} new tokens each, one in {LONG_EVERY} of them {LONG}; {MAX_ROWS} rows; medians "
          f"of {ROUNDS} rounds in turns. Continuous batching gains {gain:.2f}x, the lengths predict {expected:.2f}x.")
    if gain < LEAST_OF_PREDICTED * expected:
        print(f"That is less than {LEAST_OF_PREDICTED} of what they predict")
        return 1
    return 0


def drawn_lengths() -> list[int]:
    """New tokens of each prompt, long ones anywhere."""
    lengths = [LONG if i % LONG_EVERY == 0 else SHORT for i in range(PROMPTS)]
    random.Random(0).shuffle(lengths)
    return lengths


def measure(engine: ContestantProcess, asked: list[list[int]], lengths: list[int]) -> list[dict[str, float]]:
    """CPU seconds in each round: of both ways of batching, and of calls of some rows, a token or STEPS + 1 each."""
    ways: dict[str, tuple] = {"continuous": (asked, lengths, PROMPTS), "static": (asked, lengths, MAX_ROWS)}
    for rows in CALIBRATED:
        for new in (1, STEPS + 1):
            ways[call_of(rows, new)] = asked[:rows], [new] * rows, rows
    rounds = [{name: engine.call("ragged", *arguments, 0).cpu for name, arguments in ways.items()}
              for _ in range(ROUNDS + 1)]
    return rounds[1:]  # the first one warms up


def call_of(rows: int, new: int) -> str:
    """The name of a call that calibrates."""
    return f"{rows} rows, {new} tokens"


def calibrated(seconds: Mapping[str, float]) -> Costs:
    """From what calls of some rows took."""
    first = {rows: seconds[call_of(rows, 1)] for rows in CALIBRATED}
    steps = {rows: (seconds[call_of(rows, STEPS + 1)] - first[rows]) / STEPS for rows in CALIBRATED}
    return Costs(steps, first[MAX_ROWS] / MAX_ROWS)


def static_seconds(lengths: Sequence[int], costs: Costs) -> float:
    """Of as many prompts a call as there are rows."""
    return sum(run_seconds(lengths[start : start + MAX_ROWS], costs) for start in range(0, len(lengths), MAX_ROWS))


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
