"""`bench overlap`: a step of one-step-off-policy and of partial rollouts beside the same run colocated, and in turn.

Four gloo ranks of this host take the same GRPO steps with every role on all of them; with two that train and two that
generate, one after the other; and with these at work at the same time. What runs when is read from the traces of all
ranks. With stand-in devices four ranks are as fast as four devices; real compute on fewer cores than ranks gains
nothing by overlapping, since the cores are full either way, and only shows that it overlaps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from hybridflow.bench.overlap_case import (
    CASES,
    COLOCATED,
    IN_TURN,
    ONE_STEP_OFF,
    PARTIAL,
    WORLD,
    Answers,
    Noted,
    config_of,
    first_steps,
    ranks_of,
    run_in_turns,
    write_data,
)
from hybridflow.bench.overlap_spans import StepSeconds, step_seconds
from hybridflow.bench.stand_in import RIDGE
from hybridflow.bench.timing import summed_up
from hybridflow.config.schema import Config
from hybridflow.config.words import Overlap
from hybridflow.local_ranks import LocalRanks
from hybridflow.observe.table import table

CHECKED_STEPS = 2
TOLERANCE = 1e-8  # of losses and gradient norms in fp64
TIMEOUT_S = 300.0
HEADS = ("case", "step", "generate", "score", "update", "sum", "overlap", "of shorter", "with scoring", "staleness",
         "mixed")
Steps = list[tuple[dict[str, float], Answers]]  # metrics and all answers of each


def main(arguments: argparse.Namespace) -> int:
    """Measure and print. Returns 1 where cases do not compute what they must, or nothing is gained by overlapping."""
    print("Some minutes ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder, LocalRanks(WORLD, ("hybridflow.bench.overlap",), TIMEOUT_S) as ranks:
        write_data(Path(folder))
        faults = wrong(checked(ranks, Path(folder)))
        if faults:
            print("\n".join(faults), "Nothing is reported.", sep="\n")
            return 1
        for title, shape, device_s in (
                (f"Stand-in devices: {arguments.device_ms:g} ms a forward up to {RIDGE} tokens, more in proportion; "
                 "a backward is two", "tiny", arguments.device_ms / 1000),
                ("Real compute on the cores of this machine", "small", None)):
            print(f"{title}.")
            configs = {name: config_of(Path(folder), shape, overrides) for name, overrides in CASES.items()}
            noted = ranks.run(run_in_turns, configs, arguments.rounds, device_s)
            measured = {name: Measured.of(noted, name, config) for name, config in configs.items()}
            print(table(HEADS, [(name, *one.row()) for name, one in measured.items()]), end="\n\n")
            faults += lagging(measured) if device_s is not None else unseen(measured, "beside")
    print(f"Medians of {arguments.rounds} steps in turns, ms; parts by the slowest rank. overlap: some rank generates "
          "while another updates the actor (with scoring: or scores); staleness: mean, in steps; mixed: of the answers "
          "of a step, those that went on under newer weights.")
    print("\n".join(faults) or "One-step-off-policy takes less than generation, scoring and update one after "
          "another.")
    return 1 if faults else 0


class Measured:
    """One case: the wall seconds of a step, and its steps as the traces have them."""

    def __init__(self, wall: float, steps: Sequence[StepSeconds], metrics: Sequence[Mapping[str, float]],
                 mixed: Sequence[int]) -> None:
        """`mixed`: answers of each step that went on under newer weights."""
        self.wall, self.steps, self.metrics, self.mixed = wall, steps, metrics, mixed

    @classmethod
    def of(cls, noted: Sequence[Noted], name: str, config: Config) -> Measured:
        """From what all ranks have noted of case `name`."""
        wall = summed_up([{name: one.clocked[name]} for one in noted])[name].median_wall
        ahead = config.generation.overlap is not Overlap.NONE
        return cls(wall, step_seconds(noted[0].events[name], *ranks_of(config), ahead=ahead), noted[0].metrics[name],
                   [sum(ranks) for ranks in zip(*(one.mixed[name] for one in noted), strict=True)])

    @property
    def total(self) -> float:
        """Seconds of generation, scoring and update together."""
        return median(step.total for step in self.steps)

    def median(self, name: str) -> float:
        """Of one number of `StepSeconds`."""
        return median(vars(step)[name] for step in self.steps)

    def row(self) -> tuple[str, ...]:
        """Without the name of the case."""
        share = median(step.overlap / step.shorter for step in self.steps)
        stale = [metrics["rollout/staleness_mean"] for metrics in self.metrics if "rollout/staleness_mean" in metrics]
        return (_ms(self.wall), *(_ms(self.median(name)) for name in ("generate", "score", "update")), _ms(self.total),
                _ms(self.median("overlap")), f"{100 * share:.0f} %", _ms(self.median("beside")),
                f"{sum(stale) / len(stale):.1f}" if stale else "-", f"{sum(self.mixed) / len(self.mixed):.0f}")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


def lagging(measured: Mapping[str, Measured]) -> list[str]:
    """What overlapping does not gain."""
    wall = measured[ONE_STEP_OFF].wall
    faults = [f"{ONE_STEP_OFF}: {_ms(wall)} ms a step, and {name} has {_ms(measured[name].total)} ms of generation, "
              "scoring and update" for name in (COLOCATED, IN_TURN) if wall >= measured[name].total]
    if not any(measured[PARTIAL].mixed):
        faults.append(f"{PARTIAL}: no answer was interrupted")
    return faults + unseen(measured)


def unseen(measured: Mapping[str, Measured], part: str = "overlap") -> list[str]:
    """Cases whose traces show no overlap, `part` of `StepSeconds`, where there must be one."""
    return [f"{name}: nobody generates while others learn ({part} 0)" for name in (ONE_STEP_OFF, PARTIAL)
            if measured[name].median(part) <= 0]


def checked(ranks: LocalRanks, folder: Path) -> dict[str, Steps]:
    """The first steps of each case, in fp64."""
    found = {}
    for name, overrides in CASES.items():
        config = config_of(folder, "tiny", (*overrides, "train.mixed_precision=fp64"))
        by_rank = ranks.run(first_steps, config, CHECKED_STEPS)
        found[name] = [(steps[0][0], {row: ids for _, answers in steps for row, ids in answers.items()})
                       for steps in zip(*by_rank, strict=True)]
    return found


def wrong(found: Mapping[str, Steps]) -> list[str]:
    """What is not as it must be: in turn the same steps as colocated; one-step-off-policy a step behind and no more."""
    faults = []
    for number, (one, other) in enumerate(zip(found[COLOCATED], found[IN_TURN], strict=True), start=1):
        if one[1] != other[1]:
            faults.append(f"step {number}: {COLOCATED} and {IN_TURN} have other answers")
        for name, value in one[0].items():
            if not abs(value - other[0][name]) <= TOLERANCE * max(1.0, abs(value)):
                faults.append(f"step {number}: {name} is {value} {COLOCATED} and {other[0][name]} {IN_TURN}")
    for name in (case for case in found if case.startswith(ONE_STEP_OFF)):
        for number, (metrics, _) in enumerate(found[name]):
            behind = min(number, 1)  # of one optimizer step each
            if not metrics["rollout/staleness_mean"] == metrics["rollout/staleness_max"] == behind:
                faults.append(f"step {number + 1}: {name} is {metrics['rollout/staleness_max']:.0f} steps behind, and "
                              f"should be {behind}")
    return faults + [f"step {number}: {PARTIAL} is over 2 steps behind"
                     for number, (metrics, _) in enumerate(found[PARTIAL], start=1)
                     if metrics["rollout/staleness_max"] > 2]
