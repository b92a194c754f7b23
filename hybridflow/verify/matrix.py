"""Runs combinations one after another and holds each against one process.

Owns the comparison and what a row says. One set of processes runs all of them, so that a combination costs what its
steps cost; where one crashes, the next one gets new processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hybridflow.local_ranks import LocalRanks, RankError
from hybridflow.parallel.world import World
from hybridflow.verify.combinations import AXES, Combination
from hybridflow.verify.gradients import OURS, Parts, Step, measure, whole

MOST = 1e-9  # largest difference of any gradient, in fp64
TIMEOUT_S = 60.0
PRELOAD = ("hybridflow.verify.gradients",)


@dataclass(frozen=True)
class Verdict:
    """What became of one combination.

    Attributes:
        absolute: largest difference of any element of a gradient, over both steps; NaN where one is missing or its
            copies differ.
        relative: the same to the largest element of that tensor.
        scalars: largest relative difference of the loss's sums and of the gradient norm.
        worst: name of the tensor with the largest difference.
        same_bytes: whether reductions had as many bytes for any number of micro-batches.
        crash: what a rank raised; None where all ended.
    """

    combination: Combination
    absolute: float = np.nan
    relative: float = np.nan
    scalars: float = np.nan
    worst: str = ""
    same_bytes: bool = True
    crash: str | None = None

    @property
    def right(self) -> bool:
        return self.crash is None and self.absolute <= MOST and self.scalars <= MOST and self.same_bytes

    @property
    def fault(self) -> str:
        """Empty where it is right."""
        if self.right:
            return ""
        if self.crash is not None:
            return "crash: " + self.crash.strip().splitlines()[-1]
        if not self.same_bytes:
            return "reduced bytes depend on the micro-batches"
        return self.worst if not self.absolute <= MOST else "loss sums or gradient norm"


def verify(world: int, combinations: Sequence[Combination], parts: Parts = OURS) -> Iterator[Verdict]:
    """The verdict on each combination, as soon as it is known; the measure of all is our own engine on one process."""
    alone = Alone()
    with LocalRanks(world, (*PRELOAD, parts.engine.__module__, parts.role.__module__), TIMEOUT_S) as ranks:
        for combination in combinations:
            expected = alone.expected(combination)
            try:
                yield verdict(combination, expected, ranks.run(measure, combination, parts))
            except RankError as error:
                yield Verdict(combination, crash=str(error))


class Alone:
    """The steps of one process, kept for each model and depth."""

    def __init__(self) -> None:
        self._world = World.single(torch.device("cpu"))
        self._known: dict[Combination, Step] = {}

    def expected(self, combination: Combination) -> Step:
        """The step that every combination on this model must give."""
        plain = Combination(model=combination.model, layers=combination.num_layers)
        if plain not in self._known:
            self._known[plain] = measure(self._world, plain)[0]
        return self._known[plain]


def verdict(combination: Combination, expected: Step, by_rank: Sequence[Sequence[Step]]) -> Verdict:
    """Hold what all ranks gave against what one process gave."""
    shapes = {box.name: grad.shape for box, grad in expected.grads.items()}
    wanted = {box.name: grad for box, grad in expected.grads.items()}
    worst = Verdict(combination, absolute=0.0, relative=0.0, scalars=0.0)
    for steps in zip(*by_rank, strict=True):
        found = whole([step.grads for step in steps], shapes)
        for name, grad in wanted.items():
            difference = float(np.abs(found[name] - grad).max())
            if not difference <= worst.absolute and not np.isnan(worst.absolute):  # a NaN, once there, stays
                worst = replace(worst, absolute=difference, worst=name)
            worst = replace(worst, relative=np.maximum(worst.relative, difference / float(np.abs(grad).max())))
        worst = replace(worst, scalars=max(worst.scalars, *(_scalars_differ(step, expected) for step in steps)))
    same = all(first.reduced_bytes == second.reduced_bytes for first, second in by_rank)
    return replace(worst, same_bytes=same)


def _scalars_differ(step: Step, expected: Step) -> float:
    """Largest difference of what is logged, relative to what it should be."""
    if step.sums.keys() != expected.sums.keys():
        return np.inf
    pairs = [(step.sums[name], value) for name, value in expected.sums.items()]
    pairs.append((step.grad_norm, expected.grad_norm))
    differences = [abs(is_ - should) / max(abs(should), 1e-3) for is_, should in pairs]
    return np.inf if np.isnan(differences).any() else max(differences)


def report(verdicts: Iterator[Verdict], total: int, say: Callable[[str], None]) -> int:
    """Print a row for each verdict as it comes, and a summary. Returns the number of those that are not right."""
    widths = [max(len(axis), width) for axis, width in zip(AXES, WIDTHS, strict=True)]
    line = lambda cells: "  ".join(cell.ljust(width) for cell, width in zip(cells, widths))  # noqa: E731
    say(f"{'':>9}{line(AXES)}  absolute  relative")
    wrong, largest = [], 0.0
    for number, verdict in enumerate(verdicts, 1):
        say(f"{number:>3} / {total:<3}{line(verdict.combination.cells())}  {verdict.absolute:8.1e}  "
            f"{verdict.relative:8.1e}  {verdict.fault or 'ok'}")
        largest = np.fmax(largest, verdict.absolute)
        if not verdict.right:
            wrong.append(verdict)
    for verdict in wrong:
        if verdict.crash is not None:
            say(f"\n{verdict.combination}\n{verdict.crash}")
    say(f"{total - len(wrong)} of {total} combinations give the gradient of one process. "
        f"Largest difference {largest:.1e}, allowed {MOST:.0e}.")
    return len(wrong)


WIDTHS = (3, 3, 4, 3, 3, 11, 2, 8, 5, 9, 6, 5)
