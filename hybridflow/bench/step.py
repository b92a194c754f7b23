"""`bench step`: CPU seconds of our GRPO and PPO steps beside TRL's, and beside the least work at the peak speed.

Each contestant is a process with as many threads, the same model, prompts, lengths and settings; steps are in turns.
Nothing is reported before the gradients of both on the same rollouts agree.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hybridflow.bench import step_case as case
from hybridflow.bench.generate_process import ContestantError
from hybridflow.bench.step_options import TRL_PPO_PYTHON, TRL_PYTHON, Options
from hybridflow.bench.step_race import OURS, TRL, OtherGradientsError, Result, race, write_case
from hybridflow.observe.table import ratio, table

LEAST_FASTER = {"grpo": 2.0, "ppo": 2.5}  # times as many samples in a CPU second as TRL
PEER_OPTIONS = {"grpo": ("--trl-python", TRL_PYTHON), "ppo": ("--trl-ppo-python", TRL_PPO_PYTHON)}
HEADS = ("step", "who", *(f"{phase} s" for phase in case.PHASES), "CPU s", "least", "samples/CPU s", "to ours")


def main(arguments: argparse.Namespace) -> int:
    """Measure and print. Returns 1 where a contestant learns something else, and reports no times then; or where a
    bound is missed.
    """
    options, started = Options.of(arguments), time.perf_counter()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        write_case(Path(folder))
        for algorithm in options.algorithms:
            try:
                results.append(race(algorithm, options, Path(folder)))
            except (OtherGradientsError, ContestantError) as error:
                print(f"{algorithm}: {error}; nothing of it is reported")
                return 1
    print(table(HEADS, [row for result in results for row in rows(result)]))
    faults = [fault for result in results for fault in missed(result)]
    print("\n".join([explained(results, options, time.perf_counter() - started), *faults]))
    if options.json:
        options.json.write_text(json.dumps([_record(result) for result in results], indent=1) + "\n")
    return 1 if faults else 0


def missed(result: Result) -> list[str]:
    """The bound, where it is missed."""
    least = LEAST_FASTER[result.algorithm]
    if TRL not in result.times or result.faster >= least:
        return []
    return [f"{result.algorithm}: {result.faster:.2f} times the samples in a CPU second of TRL, not {least}"]


def rows(result: Result) -> list[tuple[str, ...]]:
    """Of the table: one for each contestant, and the least that there is to do."""
    ours, lines = result.times[OURS].median(), []
    for name, times in result.times.items():
        phases, whole = [times.median(phase) for phase in case.PHASES], times.median()
        lines.append((name, *map(_seconds, (*phases, whole, times.least())), f"{case.ROWS / whole:.1f}",
                      ratio(whole, ours)))
    floor = [getattr(result.work, phase) / result.flops for phase in case.PHASES]
    least = sum(floor)
    lines.append(("floor", *map(_seconds, (*floor, least)), "", f"{case.ROWS / least:.1f}", ratio(least, ours)))
    return [(result.algorithm if number == 0 else "", *line) for number, line in enumerate(lines)]


def explained(results: Sequence[Result], options: Options, seconds: float) -> str:
    """What the table means, and how it came about."""
    lines = [
        f"A step: {case.PROMPTS} prompts of {case.PROMPT_TOKENS} tokens, {case.SAMPLES} responses of {case.NEW_TOKENS} "
        "to each (nothing ends them), a reward of each, one update on all of them at once; a Llama of 8 million "
        "parameters in fp32. GRPO has no reference; PPO trains policy and critic and has one.",
        f"{options.threads} threads each; {options.rounds} steps of each in turns, each behind one that is not "
        "counted, as in training a step follows a step. Seconds are of CPU time, medians; \"least\" is that of the "
        "fastest step. What is neither generation nor scoring is the update. How many times as long TRL takes is the "
        "median over the rounds, each a step of both side by side.",
        "Floor: the operations of products that a step needs at least (a shared prompt once, logits where a token is "
        "predicted, nothing twice), at the speed of torch's best product of square matrices on as many threads.",
    ]
    for result in results:
        lines += [_beside_peer(result), f"{result.algorithm}: {result.to_floor:.2f} times the floor at "
                                        f"{result.flops / 1e9:.0f} GFLOP/s."]
    return "\n".join([*lines, f"Measured in {seconds / 60:.1f} minutes."])


def _beside_peer(result: Result) -> str:
    if result.difference is None:
        option, variable = PEER_OPTIONS[result.algorithm]
        return f"{result.algorithm}: TRL takes no part: give {option} or {variable} (--help says how it is got)."
    spread = ", ".join(f"{name} {min(times.totals):.2f} to {max(times.totals):.2f}"
                       for name, times in result.times.items())
    return (f"{result.algorithm}: gradients on the same rollouts differ by {result.difference:.1e} of their norm. "
            f"TRL takes {result.faster:.2f} times as long, by least times {result.faster_at_best:.2f}. "
            f"Steps took {spread}.")


def _seconds(value: float) -> str:
    return f"{value:.3f}"


def _record(result: Result) -> dict[str, object]:
    return {"algorithm": result.algorithm, "difference": result.difference, "flops_per_second": result.flops,
            "least_operations": {phase: getattr(result.work, phase) for phase in case.PHASES},
            "cpu_seconds": {name: list(times.steps) for name, times in result.times.items()},
            "wall_seconds": {name: list(times.walls) for name, times in result.times.items()}}
