"""`bench learn`: what each algorithm adds to the accuracy on held-out prompts, by its config in configs/.

One seed, one start (the quickstart's supervised model) and one task for all; each is a run of its command on ranks of
this host. It never changes a config.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from hybridflow.bench.learn_options import PREFERENCE
from hybridflow.observe.table import table

WARM_START = Path("runs/quickstart/sft/export")
SUPERVISED = ("-m", "hybridflow", "sft", "configs/sft_tiny.yaml")
ACCURACY, OF_PAIRS = "eval/accuracy", "eval/preference_accuracy"
LEAST_GAIN = 0.2  # of the share of right answers (a reward model: of pairs in their right order)
LAUNCHER = "torch/distributed/elastic/"  # in what torchrun says when a rank has ended, which is long
HEADS = ("algorithm", "held-out", "start", "end", "gain", "steps", "seconds in steps")


class RunError(RuntimeError):
    """A run ended with something other than 0."""


@dataclass(frozen=True)
class Learned:
    """What a run's metrics say of it.

    Attributes:
        metric: the name of `start` and `end`, before the first step and after the last.
        seconds: of all steps, on rank 0.
        cost: mean cost of the first and the last step's responses, where there is a cost.
    """

    algorithm: str
    metric: str
    start: float
    end: float
    steps: int
    seconds: float
    cost: tuple[float, float] | None = None

    @property
    def gain(self) -> float:
        return self.end - self.start

    @classmethod
    def read(cls, algorithm: str, path: Path) -> Learned:
        """Of a metrics.jsonl."""
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        metric = OF_PAIRS if algorithm == "reward_model" else ACCURACY
        seen = [line[metric] for line in lines if metric in line]
        times = [line["time/step"] for line in lines if "time/step" in line]
        costs = [line["cost/mean"] for line in lines if "cost/mean" in line]
        cost = (costs[0], costs[-1]) if costs else None
        return cls(algorithm, metric, seen[0], seen[-1], len(times), sum(times), cost)


def main(arguments: argparse.Namespace) -> int:
    """Run and print. Returns 1 where a run fails or gains less than `LEAST_GAIN`."""
    try:
        if not WARM_START.exists():
            _run("sft", [sys.executable, *SUPERVISED], arguments.dir)
        learned = [learn(algorithm, arguments.ranks, arguments.dir) for algorithm in arguments.algorithms]
    except RunError as error:
        print(error)
        return 1
    print(table(HEADS, [row(one) for one in learned]))
    for one in learned:
        if one.cost is not None:
            print(f"{one.algorithm}: mean cost {one.cost[0]:.3f} in the first step, {one.cost[1]:.3f} in the last.")
    faults = [f"{one.algorithm}: gains {one.gain:.3f}, not {LEAST_GAIN}" for one in learned if one.gain < LEAST_GAIN]
    print("\n".join(faults) if faults else f"Each gains at least {LEAST_GAIN}.")
    return 1 if faults else 0


def learn(algorithm: str, ranks: int, folder: Path) -> Learned:
    """One run, from the start. Raises RunError."""
    command = algorithm if algorithm in PREFERENCE else "train"
    run = folder / algorithm
    shutil.rmtree(run, ignore_errors=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    _run(algorithm, [*launcher, "-m", "hybridflow", command, f"configs/{algorithm}_tiny.yaml", f"logging.dir={run}",
                     "checkpoint.export_at_end=false"], folder)
    return Learned.read(algorithm, run / "metrics.jsonl")


def row(of: Learned) -> tuple[str, ...]:
    """Of the table."""
    what = "pairs in order" if of.metric == OF_PAIRS else "right answers"
    numbers = (f"{of.start:.3f}", f"{of.end:.3f}", f"{of.gain:+.3f}", str(of.steps), f"{of.seconds:.0f}")
    return (of.algorithm, what, *numbers)


def _run(name: str, command: list[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    with log.open("w") as out:
        ended = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    if ended:
        said = takewhile(lambda line: LAUNCHER not in line, log.read_text().splitlines())
        last = "\n".join(list(said)[-20:])
        raise RunError(f"{name} ended with {ended}; the last that it said in {log}:\n{last}")
