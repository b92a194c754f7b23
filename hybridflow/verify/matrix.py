"""Runs combinations one after another and holds each against one process.

Owns the comparison and what a row says. One set of processes runs all of them, so that a combination costs what its
steps cost; where one crashes, the next one gets new processes. Whose they are, the caller says.
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

MOST = 1e-9  # largest difference of any number, in fp64
TIMEOUT_S = 60.0
WHEN = ("in step 1", "in step 2")
PRELOAD = ("hybridflow.verify.gradients",)


@dataclass(frozen=True)
class Verdict:
    """What became of one combination.

    Attributes:
        absolute: largest difference of any element of a gradient, weight or answer, up to the first step that is
            wrong; NaN where one is missing or its copies differ.
        relative: the same to the largest element of that tensor.
        scalars: largest relative difference of the loss's sums and of the gradient norm.
        worst: the tensor with the largest difference, and when.
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


def verify(ranks: LocalRanks, combinations: Sequence[Combination], parts: Parts = OURS) -> Iterator[Verdict]:
    """The verdict on each combination, as soon as it is known; the measure of all is our own engine on one process."""
    alone = Alone()
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
        self._known: dict[Combination, list[Step]] = {}

    def expected(self, combination: Combination) -> list[Step]:
        """The steps that every combination on this model and these rows must give."""
        plain = Combination(model=combination.model, some_failed=combination.some_failed,
                            layers=combination.num_layers)
        if plain not in self._known:
            self._known[plain] = measure(self._world, plain)
        return self._known[plain]


def verdict(combination: Combination, expected: Sequence[Step], by_rank: Sequence[Sequence[Step]]) -> Verdict:
    """Hold what all ranks gave, by step, against what one process gave."""
    same = all(len({step.reduced_bytes for step in steps}) == 1 for steps in by_rank)
    worst = Verdict(combination, absolute=0.0, relative=0.0, scalars=0.0, same_bytes=same)
    for when, wanted, steps in zip(WHEN, expected, zip(*by_rank, strict=True), strict=True):
        worst = _compare(worst, when, wanted, steps)
        if not worst.right:  # all that follows is wrong too
            break
    return worst


def _compare(worst: Verdict, when: str, wanted: Step, steps: Sequence[Step]) -> Verdict:
    """`worst` with the differences of one step, which all ranks have taken."""
    shapes = {box.name: tensor.shape for box, tensor in wanted.tensors.items()}
    found = whole([step.tensors for step in steps], shapes)
    for box, tensor in wanted.tensors.items():
        difference = float(np.abs(found[box.name] - tensor).max())
        if not difference <= worst.absolute and not np.isnan(worst.absolute):  # a NaN, once there, stays
            worst = replace(worst, absolute=difference, worst=f"{box.name} {when}")
        worst = replace(worst, relative=np.maximum(worst.relative, difference / float(np.abs(tensor).max())))
    return replace(worst, scalars=max(worst.scalars, *(_scalars_differ(step, wanted) for step in steps)))


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
    say(f"{total - len(wrong)} of {total} combinations give the answers, gradients and weights of one process. "
        f"Largest difference {largest:.1e}, allowed {MOST:.0e}.")
    return len(wrong)


WIDTHS = (3, 3, 4, 3, 3, 11, 2, 8, 5, 9, 5, 6, 5, 11, 4, 9)
