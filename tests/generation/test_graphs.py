"""What a captured decode step is fed, without a GPU: a padded step computes for its rows what the plain one does."""

import pytest
import torch

from hybridflow.generation.graphs import fill, fixed_batch, padded_rows, padded_width
from hybridflow.generation.runner import Chunk, StepBatch
from hybridflow.generation.torch_runner import TorchRunner
from tests.generation.small_model import make_generator

BLOCKS = 12
TABLES = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)


def prefill(lengths: list[int]) -> StepBatch:
    firsts = [sum(lengths[:i]) for i in range(len(lengths))]
    chunks = tuple(Chunk(first, n, slot, 0) for slot, (first, n) in enumerate(zip(firsts, lengths, strict=True)))
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
    slots = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    return StepBatch(0, chunks, torch.arange(sum(lengths)) % 37, positions, slots, TABLES,
                     torch.tensor([first + n - 1 for first, n in zip(firsts, lengths, strict=True)]))


def decode(lengths: list[int], order: list[int]) -> StepBatch:
    rows = torch.tensor(order, dtype=torch.int32)
    positions = torch.tensor([lengths[slot] for slot in order], dtype=torch.int32)
    width = max(lengths) // 16 + 1
    return StepBatch(len(order), (), torch.tensor([5, 7, 11])[: len(order)], positions, rows, TABLES[:, :width],
                     torch.arange(len(order)))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0], [1]])
def test_padding_changes_no_row(order: list[int]):
    generator = make_generator(owns_weights=False)
    runner, lengths = generator.runner, [3, 17, 32]
    assert isinstance(runner, TorchRunner)
    with torch.inference_mode():
        runner.allocate(BLOCKS)
        runner.run(prefill(lengths), None)
        plain, padded = decode(lengths, order), None
        want = runner.run(plain, None)
        fixed = fixed_batch(4, padded_width(plain.tables.shape[1]), plain, BLOCKS)
        for stale in (decode(lengths, [2, 1, 0]), plain):  # a step leaves nothing behind for the next one
            fill(fixed, stale, BLOCKS)
            padded = runner.run(fixed, None)
    torch.testing.assert_close(padded[: len(order)], want, rtol=0, atol=1e-12)


def test_sizes_are_few():
    assert [padded_rows(rows) for rows in (1, 2, 3, 5, 8, 9, 33, 256)] == [1, 2, 4, 8, 8, 16, 40, 256]
    assert [padded_width(width) for width in (1, 2, 3, 5, 64, 65)] == [1, 2, 4, 8, 64, 128]
