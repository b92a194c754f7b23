"""`bench generate`: tokens a second of our generation engine beside transformers', vLLM's and the machine's limit.

Each contestant is a process with the same number of threads and the same weights; rounds are in turns. CPU seconds
count all threads of a contestant, waiting ones that spin included. Nothing is reported before all contestants have
given the greedy tokens of one model and our log-probs are transformers'.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hybridflow.bench.generate_case import MODELS, Precision, write_model
from hybridflow.bench.generate_check import WrongTokensError
from hybridflow.bench.generate_options import VLLM_PYTHON, Options
from hybridflow.bench.generate_process import ContestantError
from hybridflow.bench.generate_race import CONTINUOUS, GENERATE, OURS, VLLM, Result, race
from hybridflow.observe.table import ratio, table

LEAST_TO_TRANSFORMERS = {"tiny": 3.0, "small": 1.7}  # times as many tokens in a CPU second
LEAST_TO_VLLM = 1.0
MOST_TO_FLOOR = 1.3  # an aim, no bound
LABELS = {OURS: "ours", GENERATE: "transformers", CONTINUOUS: "transformers CB", VLLM: "vLLM"}
HEADS = ("cell", "contestant", "tokens/CPU s", "tokens/s", "CPU", "wall", "ms a step", "floor ms", "to floor")


def main(arguments: argparse.Namespace) -> int:
    """Measure and print. Returns 1 where a contestant computes something else, and reports nothing of it then; or where
    a bound is missed.
    """
    options, started = Options.of(arguments), time.perf_counter()
    results: list[Result] = []
    for model in options.models:
        for precision in map(Precision, options.dtypes):
            try:
                found = measure(model, precision, options)
            except (WrongTokensError, ContestantError) as error:
                print(f"{model} {precision.value}: {error}; nothing of it is reported")
                return 1
            results += found
            print(table(HEADS, [row for result in found for row in rows(result)]), flush=True)
    faults = [fault for result in results for fault in missed(result)]
    print("\n".join([explained(results, options, time.perf_counter() - started), *faults]))
    if options.json:
        options.json.write_text(json.dumps([_record(result) for result in results], indent=1) + "\n")
    return 1 if faults else 0


def measure(model: str, precision: Precision, options: Options) -> list[Result]:
    """All cells of one model; a line says that it is computed rightly.

    Raises:
        WrongTokensError, ContestantError: as `race`.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_model(MODELS[model], Path(folder), precision)
        results, difference = race(model, precision, options, Path(folder))
    print(f"{model} {precision.value}: our greedy tokens are transformers', others' up to near ties; our log-probs of "
          f"sampled tokens differ from its by at most {difference:.1e}", flush=True)
    return results


def missed(result: Result) -> list[str]:
    """The bounds that we miss in one cell."""
    bounds = dict.fromkeys((GENERATE, CONTINUOUS), LEAST_TO_TRANSFORMERS[result.cell.model]) | {VLLM: LEAST_TO_VLLM}
    return [f"{result.cell}: {result.faster(name):.2f} times the tokens in a CPU second of {LABELS[name]}, not {least}"
            for name, least in bounds.items() if name in result.times and not result.faster(name) >= least]


def rows(result: Result) -> list[tuple[str, ...]]:
    """Of the table, one for each contestant."""
    cell, ours, lines = result.cell, result.times[OURS], []
    ms_a_step = 1000 / cell.new_tokens
    for name, times in result.times.items():
        lines.append(("", LABELS[name], f"{cell.tokens / times.cpu:.0f}", f"{cell.tokens / times.wall:.0f}",
                      ratio(times.cpu, ours.cpu), ratio(times.wall, ours.wall), f"{min(times.walls) * ms_a_step:.2f}",
                      "", ""))
    floor = (f"{result.floor.round_seconds(cell) * ms_a_step:.2f}", f"{result.to_floor:.2f}x")
    return [(str(cell), *lines[0][1:-2], *floor), *lines[1:]]


def explained(results: Sequence[Result], options: Options, seconds: float) -> str:
    """What the table means."""
    over = [str(result.cell) for result in results if result.to_floor > MOST_TO_FLOOR]
    lines = [
        f"{options.threads} threads each; up to {options.rounds} rounds in turns, medians. Ratios are to ours: above "
        "1, ours is faster. A step is the least wall time of a round divided by its new tokens, prompts included.",
        "Floor: for the prompts operations over the peak; for a step the larger of that and bytes over bandwidth. The "
        "peak is that of torch's best product of square matrices, the bandwidth that of the best way to read as many "
        "bytes as a step does, again and again; both on as many threads: "
        + "; ".join(f"{result.cell} {result.floor.flops / 1e9:.0f} GFLOP/s, {result.floor.bytes / 1e9:.0f} GB/s"
                    for result in results) + ".",
        "A CPU second is one of any thread of a contestant.",
        f"Above {MOST_TO_FLOOR} times the floor (an aim, no bound): {', '.join(over) or 'none'}. "
        f"Measured in {seconds / 60:.1f} minutes.",
    ]
    if VLLM in options.peers and options.vllm_python is None:
        lines.append(f"vLLM takes no part: give --vllm-python or {VLLM_PYTHON}.")
    return "\n".join(lines)


def _record(result: Result) -> dict[str, object]:
    cell = result.cell
    return {"model": cell.model, "dtype": cell.precision.value, "batch": cell.batch, "new_tokens": cell.new_tokens,
            "flops_per_second": result.floor.flops, "bytes_per_second": result.floor.bytes,
            "floor_seconds": result.floor.round_seconds(cell),
            "wall_seconds": {name: times.walls for name, times in result.times.items()},
            "cpu_seconds": {name: times.cpus for name, times in result.times.items()}}
