"""One model in one precision: all contestants side by side, cell after cell, each a process of its own.

Owns who takes part, the order of turns and what was timed. Judging the times is `generate`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hybridflow.bench.generate_case import Cell, Precision, prompts
from hybridflow.bench.generate_check import OF_PEERS, TOLERANCE, check_greedy, check_sampled
from hybridflow.bench.generate_floor import Floor
from hybridflow.bench.generate_options import Options
from hybridflow.bench.generate_process import Answer, ContestantProcess

OURS, GENERATE, CONTINUOUS, VLLM, MACHINE = "ours", "generate", "continuous", "vllm", "machine"
WARM_TOKENS = 4


@dataclass(frozen=True)
class Times:
    """Seconds of one contestant's rounds in one cell."""

    walls: tuple[float, ...]
    cpus: tuple[float, ...]

    @property
    def wall(self) -> float:
        return median(self.walls)

    @property
    def cpu(self) -> float:
        return median(self.cpus)


@dataclass(frozen=True)
class Result:
    """One cell. `times` are by contestant, ours first."""

    cell: Cell
    floor: Floor
    times: Mapping[str, Times]

    def faster(self, than: str) -> float:
        """How many times as many tokens we make in a CPU second."""
        return self.times[than].cpu / self.times[OURS].cpu

    @property
    def to_floor(self) -> float:
        """Our least wall seconds, which what else the machine does lengthens least, to the machine's."""
        return min(self.times[OURS].walls) / self.floor.round_seconds(self.cell)


def race(model: str, precision: Precision, options: Options, folder: Path) -> tuple[list[Result], float]:
    """All cells of a model that lies in `folder`, and the largest difference of our log-probs to transformers'.

    Raises:
        WrongTokensError: a contestant does not compute the model.
        ContestantError: a contestant ended.
    """
    with ExitStack() as stack:
        def start(name: str) -> ContestantProcess:
            python = options.vllm_python if name == VLLM else sys.executable
            assert python is not None, "vLLM takes part where its interpreter is given"
            return stack.enter_context(ContestantProcess(name, folder, precision.value, options.threads, python))

        machine, judge = start(MACHINE), start(GENERATE)  # the judge is asked even if it does not race
        racing = {name: judge if name == GENERATE else start(name) for name in names(options)}
        for process in {machine, judge, *racing.values()}:
            process.ready()
        first = Cell(model, precision, 1, options.new_tokens)
        for name, process in racing.items():
            check_greedy(process, judge, first, TOLERANCE[precision] if name == OURS else OF_PEERS)
        difference = check_sampled(racing[OURS], judge, first)
        cells = [Cell(model, precision, batch, options.new_tokens) for batch in options.batches]
        results = []
        for cell in cells:
            print(f"{cell} ...", file=sys.stderr, flush=True)  # a cell takes minutes where a peer is slow
            results.append(_raced(cell, racing, machine, options))
        return results, difference


def names(options: Options) -> list[str]:
    """Who takes part, ours first."""
    return [OURS, *(peer for peer in options.peers if peer != VLLM or options.vllm_python)]


def _raced(cell: Cell, racing: Mapping[str, ContestantProcess], machine: ContestantProcess, options: Options) -> Result:
    floor = Floor(machine.call("flops_per_second").value, machine.call("bytes_per_second", cell.step_bytes).value)
    for process in racing.values():
        process.call("sample", prompts(cell, -1), min(WARM_TOKENS, cell.new_tokens), 0)
    rounds: dict[str, list[Answer]] = {name: [] for name in racing}
    for number in range(options.rounds):
        for name in turn(list(racing), number):
            if sum(one.wall for one in rounds[name]) < options.seconds:
                rounds[name].append(_sampled(racing[name], cell, number))
    times = {name: Times(tuple(one.wall for one in answers), tuple(one.cpu for one in answers))
             for name, answers in rounds.items()}
    return Result(cell, floor, times)


def turn(racing: Sequence[str], number: int) -> list[str]:
    """The order of a round: each starts with another contestant."""
    first = number % len(racing)
    return [*racing[first:], *racing[:first]]


def _sampled(process: ContestantProcess, cell: Cell, number: int) -> Answer:
    """A whole round: where a contestant slows down as responses grow, the first tokens say too little."""
    answer = process.call("sample", prompts(cell, number), cell.new_tokens, number)
    assert answer.value == cell.tokens, f"{process.name} drew {answer.value} tokens of {cell.tokens}"
    return answer
