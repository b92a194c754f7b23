"""What this machine can do at best: the floor beside each cell of `bench generate`.

Owns the measuring of arithmetic and of reading, on as many threads as the contestants have. It runs no model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybridflow.bench.generate_case import Cell, Precision

GEMM_SIZES = (512, 1024, 2048)
LEAST_S = 0.3  # each way of using the machine is tried for so long, and its best call counts
WIDTH = 4096  # numbers in a row of what is read


class Machine:
    """The contestant that measures; its folder is not read."""

    def __init__(self, folder: str, precision: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._dtype = Precision(precision).dtype
        self._flops = 0.0

    def flops_per_second(self) -> float:
        """Of the best product of square matrices since the start. For bf16 the better of both dtypes: where there is no
        bf16 hardware, fp32 is what one would compute with.
        """
        dtypes = {torch.float32, self._dtype}
        found = (2 * size**3 / least_seconds(_product(size, dtype)) for size in GEMM_SIZES for dtype in dtypes)
        self._flops = max(self._flops, *found)
        return self._flops

    def bytes_per_second(self, num_bytes: int) -> float:
        """Reading `num_bytes`, which were read just before, as decoding reads its weights: the best of a product with a
        vector, a scalar product and a sum.
        """
        matrix = torch.ones(max(1, num_bytes // (4 * WIDTH)), WIDTH)
        flat, vector = matrix.view(-1), torch.ones(WIDTH)
        ways = (lambda: torch.mv(matrix, vector), lambda: torch.dot(flat, flat), lambda: flat.sum())
        return matrix.nbytes / min(map(least_seconds, ways))


@dataclass(frozen=True)
class Floor:
    """What the machine does at best, for one working set.

    Attributes:
        flops, bytes: per second.
    """

    flops: float
    bytes: float

    def step_seconds(self, cell: Cell) -> float:
        """Of a decode step in the middle of the response."""
        return max(cell.step_flops / self.flops, cell.step_bytes / self.bytes)

    def round_seconds(self, cell: Cell) -> float:
        """Of the prompts and all steps but the first token's, which the prompts give."""
        return cell.prefill_flops / self.flops + (cell.new_tokens - 1) * self.step_seconds(cell)


def least_seconds(run: Callable[[], object]) -> float:
    """Of the fastest of several calls."""
    run()
    taken, end = [], time.perf_counter() + LEAST_S
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _product(size: int, dtype: torch.dtype) -> Callable[[], object]:
    left, right, out = (torch.ones(size, size, dtype=dtype) for _ in range(3))
    return lambda: torch.mm(left, right, out=out)
