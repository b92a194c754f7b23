"""One model in one precision: all contestants side by side, cell after cell, each a process of its own.

Owns who takes part, the order of turns and what was timed. Judging the times is `generate`'s.
"""

from __future__ import annotations

import sys
import time
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
WARM_TOKENS, PROBE_TOKENS = 4, 16
PART = 33  # new tokens of a slow contestant's turn, the first of which is timed alone, too
SLOW = 2.0  # times `Options.seconds` that a round of it would take


@dataclass(frozen=True)
class Times:
    """Seconds of one contestant's rounds in one cell.

    Attributes:
        from_part: it was so slow that parts of rounds were timed, see `part_of_round`.
    """

    walls: tuple[float, ...]
    cpus: tuple[float, ...]
    from_part: bool = False

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
    for_a_round = {name: _warmed(process, cell) for name, process in racing.items()}
    slow = [name for name, seconds in for_a_round.items() if name != OURS and seconds > SLOW * options.seconds]
    rounds: dict[str, list[Answer]] = {name: [] for name in racing}
    spent = dict.fromkeys(racing, 0.0)
    for number in range(options.rounds):
        for name in turn(list(racing), number):
            if spent[name] < options.seconds:
                started = time.perf_counter()
                rounds[name].append((part_of_round if name in slow else whole_round)(racing[name], cell, number))
                spent[name] += time.perf_counter() - started
    return Result(cell, floor, {
        name: Times(tuple(one.wall for one in answers), tuple(one.cpu for one in answers), name in slow)
        for name, answers in rounds.items()})


def _warmed(process: ContestantProcess, cell: Cell) -> float:
    """Warm up. Returns about how many wall seconds a round takes; 0 where it is too short to be timed by a part."""
    process.call("sample", prompts(cell, -1), min(WARM_TOKENS, cell.new_tokens), 0)
    if cell.new_tokens <= PART:
        return 0.0
    return process.call("sample", prompts(cell, -2), PROBE_TOKENS, 0).wall * cell.new_tokens / PROBE_TOKENS


def whole_round(process: ContestantProcess, cell: Cell, number: int) -> Answer:
    """What a round takes."""
    answer = process.call("sample", prompts(cell, number), cell.new_tokens, number)
    assert answer.value == cell.tokens, f"{process.name} drew {answer.value} tokens of {cell.tokens}"
    return answer


def part_of_round(process: ContestantProcess, cell: Cell, number: int) -> Answer:
    """What a round takes if it goes on as it begins: its first PART tokens, and from then on the pace of those behind
    the first. In truth the later ones attend to more: it takes longer.
    """
    first = process.call("sample", prompts(cell, -3 - number), 1, number)
    part = process.call("sample", prompts(cell, number), PART, number)

    def continued(first: float, part: float) -> float:
        return part + max(0.0, part - first) * (cell.new_tokens - PART) / (PART - 1)

    return Answer(cell.tokens, continued(first.wall, part.wall), continued(first.cpu, part.cpu))


def turn(racing: Sequence[str], number: int) -> list[str]:
    """The order of a round: each starts with another contestant."""
    first = number % len(racing)
    return [*racing[first:], *racing[:first]]
