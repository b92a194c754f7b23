"""The contestants of `bench step`, each a process of its own: that they learn the same, and steps in turns.

Owns the comparison of gradients, the order of turns and what was timed. Judging the times is `step`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file

from hybridflow.bench import step_case as case
from hybridflow.bench.generate_case import MODELS, Precision, write_model
from hybridflow.bench.generate_process import ContestantProcess
from hybridflow.bench.generate_race import turn
from hybridflow.bench.step_options import Options
from hybridflow.models.config import Head, ModelConfig

OURS, TRL = "ours", "TRL"
MODEL = "tiny"
# Of the difference of two gradients, beside the norm of one: rounding in another order, in fp32.
TOLERANCE = 1e-3


class OtherGradientsError(Exception):
    """The contestants do not learn the same from the same rollouts, so that their times say nothing."""


@dataclass(frozen=True)
class Times:
    """CPU seconds of one contestant's steps, by phase, and wall seconds."""

    steps: tuple[case.Spent, ...]
    walls: tuple[float, ...]

    @property
    def totals(self) -> list[float]:
        return [sum(step.values()) for step in self.steps]

    def median(self, phase: str | None = None) -> float:
        """Of a phase, or of whole steps."""
        return median(self.totals if phase is None else [step[phase] for step in self.steps])

    def least(self, phase: str | None = None) -> float:
        return min(self.totals if phase is None else [step[phase] for step in self.steps])


@dataclass(frozen=True)
class Result:
    """One algorithm. `times` are by contestant, ours first.

    Attributes:
        difference: of the gradients, beside their norm; None without a peer.
        flops: a second, of this machine's best product on as many threads.
        work: the operations that a step needs at least.
    """

    algorithm: str
    times: Mapping[str, Times]
    difference: float | None
    flops: float
    work: case.Work

    @property
    def faster(self) -> float:
        """How many times as many samples we learn from in a CPU second: the median over rounds, whose two steps met the
        machine in one state (its memory is others' too).
        """
        return median(theirs / mine for theirs, mine in
                      zip(self.times[TRL].totals, self.times[OURS].totals, strict=True))

    @property
    def faster_at_best(self) -> float:
        """The same by least times, which what else the machine does lengthens least."""
        return self.times[TRL].least() / self.times[OURS].least()

    @property
    def to_floor(self) -> float:
        """Our median to what the least work takes."""
        return self.times[OURS].median() * self.flops / self.work.total


def write_case(folder: Path) -> None:
    """Policy, critic and tokenizer."""
    write_model(MODELS[MODEL], folder / case.POLICY, Precision.FP32)
    write_model(MODELS[MODEL], folder / case.CRITIC, Precision.FP32, seed=1, head=Head.VALUE)
    case.write_tokenizer(folder / case.TOKENIZER)


def race(algorithm: str, options: Options, folder: Path) -> Result:
    """Check and time one algorithm on what `write_case` has put into `folder`.

    Raises:
        OtherGradientsError: the contestants' gradients differ.
        ContestantError: a contestant ended.
    """
    with ExitStack() as stack:
        def start(name: str, python: str = sys.executable) -> ContestantProcess:
            return stack.enter_context(ContestantProcess(name, folder, Precision.FP32.value, options.threads, python))

        machine, racing = start("machine"), {OURS: start(f"step ours {algorithm}")}
        peer = options.peer_python(algorithm)
        if peer is not None:
            racing[TRL] = start(f"step trl {algorithm}", peer)
        for process in (machine, *racing.values()):
            process.ready()
        difference = None if peer is None else check(algorithm, racing, folder)
        found: dict[str, tuple[list[case.Spent], list[float]]] = {name: ([], []) for name in racing}
        flops = 0.0
        for number in range(options.rounds + 1):
            flops = max(flops, machine.call("flops_per_second").value)
            for name in turn(list(racing), number):
                # In training a step follows a step; one that follows a wait of some seconds, as for the others' turn,
                # has taken up to 1.5 times as long (a virtual machine; why is not known). It is not counted.
                racing[name].call("step", number)
                answer = racing[name].call("step", number)
                if number:  # the first round is to warm up
                    found[name][0].append(answer.value)
                    found[name][1].append(answer.wall)
    times = {name: Times(tuple(steps), tuple(walls)) for name, (steps, walls) in found.items()}
    return Result(algorithm, times, difference, flops, work_of(algorithm, MODELS[MODEL]))


def check(algorithm: str, racing: Mapping[str, ContestantProcess], folder: Path) -> float:
    """How far the gradients of the same rollouts, with their rewards, advantages and losses, are apart.

    Raises:
        OtherGradientsError: farther than rounding takes them.
    """
    files = {}
    for name, process in racing.items():
        files[name] = folder / f"{algorithm} {name}.safetensors"
        process.call("gradients", str(files[name]))
    difference = largest_difference(*(load_file(files[name]) for name in (OURS, TRL)), algorithm)
    if not difference <= TOLERANCE:  # NaN is no pass
        raise OtherGradientsError(f"{algorithm}: our gradient and TRL's on the same rollouts differ by "
                                  f"{difference:.1e} of their norm, more than {TOLERANCE:.0e}")
    return difference


def largest_difference(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], algorithm: str) -> float:
    """Over the trained models, the norm of the difference of two gradients beside that of the second.

    GRPO's of TRL is read behind its clipping, and TRL adds 1e-4 to the deviation of a group's rewards. PPO's policy
    gradient is in proportion to 1 / sqrt(variance) of the advantages, of which TRL takes the unbiased one.
    """
    if ours.keys() != theirs.keys():
        raise OtherGradientsError(f"{algorithm}: only one of the two trains "
                                  f"{', '.join(sorted(ours.keys() ^ theirs.keys()))}")
    found, samples = [], case.ROWS * case.NEW_TOKENS
    for role in sorted({name.partition(".")[0] for name in ours}):
        mine, other = (torch.cat([grads[name].flatten().double() for name in sorted(grads) if name.startswith(role)])
                       for grads in (ours, theirs))
        if algorithm == "grpo":
            mine = mine * min(1.0, case.CLIP_GRAD_NORM / (mine.norm().item() + 1e-6))
        elif role == "policy":
            mine = mine * (1 - 1 / samples) ** 0.5
        found.append((mine - other).norm() / other.norm())
    return torch.stack(found).max().item()  # NaN where one is


def work_of(algorithm: str, config: ModelConfig) -> case.Work:
    """The operations that a step of this model needs at least."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv) + 3 * config.hidden_size * config.intermediate_size
    return case.least_work(algorithm, body=config.num_layers * layer, head=config.vocab_size * config.hidden_size,
                           attention=config.num_layers * 2 * heads)
