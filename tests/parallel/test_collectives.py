"""Collectives and their adjoints against the dense computation, also where coordinates are not in rank order."""

import pytest
import torch
import torch.distributed as dist

from hybridflow.parallel import collectives
from hybridflow.parallel.mesh import AxisGroup
from hybridflow.parallel.world import World
from tests.ranks import run_ranks

ORDERS = ((0, 1, 2, 3), (2, 0, 3, 1))
SIZES = (8, 120_000)  # below and above the direct exchange's limit for four ranks in fp64


def rows(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def group_of(world: World, order: tuple[int, ...]) -> AxisGroup:
    return AxisGroup(order, order.index(world.rank), world.group(order))


def check_values(world: World) -> list[torch.Tensor]:
    sums = []
    for order in ORDERS:
        group = group_of(world, order)
        for size in SIZES:
            mine, everyone = rows(world.rank, size), [rows(rank, size) for rank in order]
            dense = torch.stack(everyone).sum(0)
            reduced = collectives.all_reduce(mine.clone(), group)
            torch.testing.assert_close(reduced, dense, rtol=0, atol=1e-13)
            sums.append(reduced[:100])
            assert torch.equal(collectives.all_gather(mine, group), torch.cat(everyone))
            part = collectives.reduce_scatter(mine, group)
            torch.testing.assert_close(part, dense.chunk(4)[group.index], rtol=0, atol=1e-13)
            top = collectives.all_reduce(mine.clone(), group, dist.ReduceOp.MAX)
            assert torch.equal(top, torch.stack(everyone).amax(0))
    return sums


def test_values_and_that_every_member_gets_the_same_bits():
    by_rank = run_ranks(4, check_values)
    for sums in by_rank[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(sums, by_rank[0]))


def check_backend_forms(world: World) -> None:
    for order in ORDERS:
        group = group_of(world, order)
        mine, everyone = rows(world.rank, 8), [rows(rank, 8) for rank in order]
        gathered = collectives._gather_on_device(mine, group, mine.new_empty(32, 3)).wait()
        assert torch.equal(gathered, torch.cat(everyone))
        part = collectives._reduce_scatter_on_device(mine, group, mine.new_empty(2, 3)).wait()
        torch.testing.assert_close(part, sum(everyone).chunk(4)[group.index], rtol=0, atol=1e-13)


def test_the_forms_for_devices_follow_coordinate_order_too():
    run_ranks(4, check_backend_forms)


def several_under_way(world: World, piece: int) -> list[torch.Tensor]:
    """Started together and waited for in that order; results in place, in given memory, and in another dtype."""
    collectives.PIECE, before = piece, collectives.PIECE
    results = []
    for order in ORDERS:
        group = group_of(world, order)
        everyone = [rows(rank, 8) for rank in order]
        dense, part = sum(everyone), slice(2 * group.index, 2 * group.index + 2)
        buffer, whole = rows(world.rank, 8), torch.full((32, 3), float("nan"), dtype=torch.float64)
        whole[8 * group.index : 8 * group.index + 8] = rows(world.rank, 8)
        pending = [
            collectives.start_reduce_scatter(buffer, group, out=buffer[part]),
            collectives.start_all_reduce(rows(world.rank, 8), group),
            collectives.start_all_gather(whole[8 * group.index : 8 * group.index + 8], group, out=whole),
            collectives.start_reduce_scatter(rows(world.rank, 8).bfloat16(), group, sum_dtype=torch.float32),
            collectives.start_all_reduce(rows(world.rank, SIZES[1]), group).then(lambda x: x[:8] / 2),
        ]
        share, total, gathered, rounded, half = [each.wait() for each in pending]
        torch.testing.assert_close(share, dense[part], rtol=0, atol=1e-13)
        assert share.data_ptr() == buffer[part].data_ptr() and gathered.data_ptr() == whole.data_ptr()
        torch.testing.assert_close(total, dense, rtol=0, atol=1e-13)
        assert torch.equal(gathered, torch.cat(everyone))
        parts = [x.bfloat16().float() for x in everyone]
        assert torch.equal(rounded, (((parts[0] + parts[1]) + parts[2]) + parts[3])[part])
        torch.testing.assert_close(half, sum(rows(rank, SIZES[1])[:8] for rank in order) / 2, rtol=0, atol=1e-13)
        assert [each.nbytes for each in pending] == [192, 192, 192, 48, 24 * SIZES[1]]
        assert pending[0].wait() is share
        results += [total, half]
    collectives.PIECE = before
    return results


@pytest.mark.parametrize("piece", [1 << 24, 5])
def test_collectives_overlap(piece: int):
    by_rank = run_ranks(4, several_under_way, piece)
    for results in by_rank[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(results, by_rank[0]))


def test_a_group_of_one_is_the_identity():
    alone, x = AxisGroup((0,), 0, None), torch.randn(4, 2)
    for start in (collectives.start_all_reduce, collectives.start_all_gather, collectives.start_reduce_scatter):
        pending = start(x, alone)
        assert pending.wait() is x and pending.nbytes == 0


def not_contiguous(world: World) -> None:
    group = group_of(world, (0, 1, 2, 3))
    view = rows(world.rank, 8).T
    collectives.all_reduce(view, group)
    torch.testing.assert_close(view, sum(rows(rank, 8) for rank in range(4)).T, rtol=0, atol=1e-13)


def test_a_strided_tensor_is_reduced_in_place():
    run_ranks(4, not_contiguous)


PAIRS = {  # what the whole group computes from everyone's input, and whether each member's output counts by itself
    "copy_to": lambda xs: xs,
    "reduce_from": lambda xs: [sum(xs)] * 4,
    "gather_tokens": lambda xs: [torch.cat(xs)] * 4,
    "reduce_scatter_tokens": lambda xs: list(sum(xs).chunk(4)),
    "gather_replicated": lambda xs: [torch.cat(xs)] * 4,
}
REPLICATED_INPUT = ("copy_to",)
REPLICATED_OUTPUT = ("reduce_from", "gather_replicated")


def gradient(world: World, name: str) -> torch.Tensor:
    group = group_of(world, ORDERS[1])
    x = rows(0 if name in REPLICATED_INPUT else world.rank, 8).requires_grad_()
    y = getattr(collectives, name)(x, group)
    weight = rows(9 if name in REPLICATED_OUTPUT else 10 + world.rank, y.shape[0])
    (y * weight).sum().backward()
    return x.grad


@pytest.mark.parametrize("name", list(PAIRS))
def test_gradients_are_those_of_the_whole_computation(name: str):
    order = ORDERS[1]
    same = name in REPLICATED_INPUT
    xs = [rows(0 if same else rank, 8).requires_grad_() for rank in order]
    inputs = [xs[0]] * 4 if same else xs
    outputs = PAIRS[name](inputs)
    if name in REPLICATED_OUTPUT:
        loss = (outputs[0] * rows(9, outputs[0].shape[0])).sum()  # computed alike on every rank, counted once
    else:
        loss = sum((y * rows(10 + rank, y.shape[0])).sum() for y, rank in zip(outputs, order))
    loss.backward()
    by_rank = run_ranks(4, gradient, name)
    for i, rank in enumerate(order):
        torch.testing.assert_close(by_rank[rank], inputs[i].grad, rtol=0, atol=1e-13)


def tree_sums(world: World) -> list[torch.Tensor]:
    sums = []
    for order in ORDERS:
        group = group_of(world, order)
        for size in (1, 63, *SIZES):
            a, b, c, d = (rows(rank, size) for rank in order)
            total = collectives.tree_sum(rows(world.rank, size), group)
            assert torch.equal(total, (a + b) + (c + d)), size
            if size % 4 == 0:
                part = collectives.reduce_scatter(rows(world.rank, size), group)
                assert torch.equal(part, total.chunk(4)[group.index]), size
            pair = AxisGroup(order[:2], group.index % 2, world.group(order[:2]))
            other = AxisGroup(order[2:], group.index % 2, world.group(order[2:]))
            half = collectives.tree_sum(rows(world.rank, size), pair if group.index < 2 else other)
            assert torch.equal(half, a + b if group.index < 2 else c + d)
            sums.append(total[:100])
    return sums


def test_a_tree_sum_adds_pairs_and_pairs_of_pairs():
    run_ranks(4, tree_sums)
    parts = [torch.tensor([1e16]), torch.tensor([1.0]), torch.tensor([1.0])]
    assert collectives._sum_as_tree(parts) == torch.tensor([1e16])
