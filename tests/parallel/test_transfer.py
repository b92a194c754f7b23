"""Plans move what is missing and nothing more; the executor fills every box within its buckets."""

import pytest
import torch

from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.mesh import Grid, Layout
from hybridflow.parallel.plan import TransferPlan, lower_bound_numel
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.transfer import execute
from hybridflow.parallel.world import World
from tests.ranks import run_ranks

SHAPES = {"rows": (8, 6), "cols": (6, 8), "norm": (6,), "layer0": (4, 4), "layer1": (4, 4)}


def toy_map(grid: Grid) -> ShardMap:
    """A column-cut, a row-cut and a replicated tensor on every stage, and one layer on each half of the stages."""
    def shards_of(rank: int) -> list[Shard]:
        at, (tp, pp) = grid.coord(rank), (grid.layout.tp, grid.layout.pp)
        rows, cols = 8 // tp, 8 // tp
        held = [Shard.of_rows(Box("rows", (at.tp * rows, 0), ((at.tp + 1) * rows, 6)), "rows"),
                Shard.of_rows(Box("cols", (0, at.tp * cols), (6, (at.tp + 1) * cols)), "cols"),
                Shard.of_rows(Box("norm", (0,), (6,)), "norm")]
        for layer in range(2):
            if pp == 1 or layer == at.pp // (pp // 2):
                held.append(Shard.of_rows(Box(f"layer{layer}", (0, 0), (4, 4)), f"layer{layer}"))
        return held
    return ShardMap(SHAPES, grid.ranks, shards_of)


def full_tensors() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
            for i, (name, shape) in enumerate(SHAPES.items())}


def storages(shard_map: ShardMap, rank: int, fill: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    made = {s.storage: torch.full(s.box.shape, float("nan"), dtype=torch.float64) for s in shard_map.shards(rank)}
    if fill is not None:
        for shard in shard_map.shards(rank):
            shard.view(made).copy_(fill[shard.box.name][shard.box.slices])
    return made


LAYOUTS = [Layout(4, 1, 1), Layout(2, 2, 1), Layout(1, 4, 1), Layout(2, 1, 2), Layout(1, 2, 2), Layout(1, 1, 4)]


@pytest.mark.parametrize("src", LAYOUTS, ids=str)
@pytest.mark.parametrize("dst", LAYOUTS, ids=str)
def test_every_plan_receives_the_lower_bound(src: Layout, dst: Layout):
    source, dest = toy_map(Grid.of(src)), toy_map(Grid.of(dst))
    plan = TransferPlan(source, dest)
    for rank in range(4):
        assert plan.received_numel(rank) == lower_bound_numel(source, dest, rank)
    if src == dst:
        assert plan.max_peers == 0


def check_transfer(world: World, bucket_bytes: int) -> list[tuple[int, int]]:
    counted = []
    for src, dst in [(a, b) for a in LAYOUTS for b in LAYOUTS]:
        source, dest = toy_map(Grid.of(src)), toy_map(Grid.of(dst))
        plan = TransferPlan(source, dest)
        have = storages(source, world.rank, full_tensors())
        want = storages(dest, world.rank, None)
        stats = execute(plan, world, have, want, wire_dtype=torch.float64, bucket_bytes=bucket_bytes)
        expected = storages(dest, world.rank, full_tensors())
        assert all(torch.equal(want[name], expected[name]) for name in expected), (src, dst)
        counted.append((stats.received_bytes, 8 * lower_bound_numel(source, dest, world.rank)))
    return counted


@pytest.mark.parametrize("bucket_bytes", [48, 2**20])
def test_bytes_on_the_wire_equal_the_lower_bound_and_every_box_arrives(bucket_bytes: int):
    for counted in run_ranks(4, check_transfer, bucket_bytes):
        assert all(received == bound for received, bound in counted)
        assert sum(received for received, _ in counted) > 0


def test_a_box_that_nobody_holds_is_named():
    whole = ShardMap({"w": (4, 2)}, (0,), lambda rank: [Shard.of_rows(Box.whole("w", (4, 2)), "w")])
    half = ShardMap({"w": (4, 2)}, (0,), lambda rank: [Shard.of_rows(Box("w", (0, 0), (2, 2)), "w")])
    with pytest.raises(ValueError, match=r"w\[\(2, 0\):\(4, 2\)\] wanted by rank 0"):
        TransferPlan(half, whole)
    with pytest.raises(ValueError, match="disagree on 1 tensors"):
        TransferPlan(ShardMap({"w": (4, 3)}, (0,), whole.shards_of), whole)


def rows_map(rows_of: list[range]) -> ShardMap:
    """A table of 2,000 rows in which every row of a rank is a box."""
    return ShardMap({"rows": (2000, 3)}, tuple(range(4)), lambda rank: [
        Shard.of_rows(Box("rows", (row, 0), (row + 1, 3)), "rows", place) for place, row in enumerate(rows_of[rank])])


def test_planning_looks_at_a_few_boxes_for_each_copy(monkeypatch: pytest.MonkeyPatch):
    calls, intersect = [], Box.intersect
    monkeypatch.setattr(Box, "intersect", lambda box, other: calls.append(box) or intersect(box, other))
    dealt, turned = [range(r, 2000, 4) for r in range(4)], [range((r + 1) % 4, 2000, 4) for r in range(4)]
    whole = ShardMap({"rows": (2000, 3)}, tuple(range(4)),
                     lambda rank: [Shard.of_rows(Box.whole("rows", (2000, 3)), "rows")])
    for dest, copies in ((rows_map(turned), 2000), (whole, 8000)):
        calls.clear()
        plan = TransferPlan(rows_map(dealt), dest)
        assert len(plan.copies) == copies and len(calls) <= 2 * copies
