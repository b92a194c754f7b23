"""Sums over rows, whole or cut over context ranks: equal, and with the gradient of the whole."""

import pytest
import torch

from hybridflow.context import ContextPart
from hybridflow.micro_batch import MicroBatch, Sample, TokenColumns
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.world import World
from hybridflow.target_rows import TargetRows
from tests.ranks import run_ranks

SAMPLES = [Sample((1,), (2, 3, 4, 5, 6)), Sample((1, 2), ()), Sample((3, 1), (4,)), Sample((9,) * 7, (8, 7, 6))]
NUM = 9


def test_sums_and_means_of_ragged_rows():
    rows = TargetRows.of([2, 0, 1])
    x = torch.tensor([1.0, 2.0, 4.0])
    assert rows.index.tolist() == [0, 0, 2] and rows.sums(x).tolist() == [3.0, 0.0, 4.0]
    assert rows.means(x, torch.tensor([0, 1, 1])).tolist() == [2.0, 0.0, 4.0]
    assert rows.to_targets(torch.tensor([5.0, 6.0, 7.0])).tolist() == [5.0, 5.0, 7.0]


def test_masked_targets_may_be_nan():
    rows = TargetRows.of([2])
    x = torch.tensor([float("nan"), 2.0], requires_grad=True)
    mean = rows.means(x, torch.tensor([0.0, 1.0]))
    mean.sum().backward()
    assert mean.tolist() == [2.0] and x.grad.tolist() == [0.0, 1.0]


def row_loss(world: World, cp: int) -> tuple[list[float], float, list[float]]:
    """Sums of rows, a loss of one term a row and one of each target, and the gradient of both, put together again."""
    mesh = Mesh(Grid.of(Layout(cp=cp)), world)
    part = ContextPart(mesh.cp.size, mesh.cp.index)
    whole = torch.arange(NUM, dtype=torch.float64)
    packed = MicroBatch.pack(SAMPLES, TokenColumns(advantages=whole), device=torch.device("cpu"), cp=part)
    x = packed.columns.advantages.clone().requires_grad_()
    rows = packed.rows(mesh.cp)
    sums = rows.sums(x.square())
    loss = (rows.to_targets(sums) * x).sum()
    if rows.counts_here:
        loss = loss + sums.square().sum()
    loss.backward()
    gradient = torch.zeros(NUM, dtype=torch.float64)
    gradient[packed.columns.advantages.long()] = x.grad
    return sums.tolist(), loss.item(), gradient.tolist()


@pytest.mark.parametrize("cp", [2, 4])
def test_context_ranks_find_the_sums_and_the_gradient_of_whole_rows(cp):
    [(sums, loss, gradient)] = [row_loss(World.single(torch.device("cpu")), 1)]
    found = run_ranks(cp, row_loss, cp)
    assert all(one[0] == pytest.approx(sums) for one in found)
    assert sum(one[1] for one in found) == pytest.approx(loss)
    assert torch.tensor([one[2] for one in found]).sum(0).tolist() == pytest.approx(gradient)
