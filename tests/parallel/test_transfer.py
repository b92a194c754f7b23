"""Plans move what is missing and nothing more; the executor fills every box within its buckets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hybridflow.local_ranks import LocalRanks
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.mesh import Grid, Layout
from hybridflow.parallel.nodes import Nodes
from hybridflow.parallel.parcels import TransferError
from hybridflow.parallel.peers import PeerError, swap
from hybridflow.parallel.plan import Copy, TransferPlan, lower_bound_numel
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.transfer import Transfer, execute
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
        assert not any(plan.wires(rank) for rank in range(4))


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


def check_passing_on(world: World) -> list[int]:
    """From few ranks to many, across nodes, by hops; and back to few."""
    hops = []
    for ranks, target, nodes in [((0,), (1, 2, 3), Nodes()), ((0,), (0, 1, 2, 3), Nodes(2)), ((0, 1), (2, 3), Nodes(2)),
                                 ((1,), (0, 2, 3), Nodes(1))]:
        source, dest = toy_map(Grid(Layout(1, 1, len(ranks)), ranks)), toy_map(Grid(Layout(1, 1, len(target)), target))
        for bucket_bytes in (100, 2**20):
            plan = TransferPlan(source, dest, nodes)
            want = storages(dest, world.rank, None)
            execute(plan, world, storages(source, world.rank, full_tensors()), want, wire_dtype=torch.float64,
                    bucket_bytes=bucket_bytes)
            expected = storages(dest, world.rank, full_tensors())
            assert all(torch.equal(want[name], expected[name]) for name in expected), (ranks, target, nodes)
        hops.append(max(copy.hop for copy in plan.copies))
    return hops


def test_what_came_is_passed_on():
    for hops in run_ranks(4, check_passing_on):
        assert max(hops) > 0


def check_relay(world: World) -> bool:
    """0 -> 1 -> 2 -> 3, each from where the one before has put it, in another dtype and by columns."""
    box = Box.whole("w", (40, 6))
    rows, columns = Shard.of_rows(box, "rows"), Shard(box, "columns", 0, (1, 40))
    copies = [Copy(rank, rank + 1, box, rows if rank == 0 else columns, (columns, rows), rank) for rank in range(3)]
    plan = TransferPlan(ShardMap({}, (), lambda rank: []), ShardMap({}, (), lambda rank: []))
    plan.of_rank = lambda rank: tuple(copy for copy in copies if rank in (copy.source, copy.dest))
    values = torch.arange(240, dtype=torch.float32).view(40, 6)
    have = {"rows": values.clone()} if world.rank == 0 else {}
    got = {"rows": torch.zeros(240, dtype=torch.float64), "columns": torch.zeros(240, dtype=torch.float32)}
    execute(plan, world, have, got, wire_dtype=torch.float32, bucket_bytes=8 * 50)
    return world.rank == 0 or (torch.equal(got["rows"].view(40, 6), values.double())
                               and torch.equal(got["columns"].view(6, 40), values.T))


def test_a_relay_sends_what_has_landed():
    assert run_ranks(4, check_relay) == [True] * 4


def pairs_map(ranks: tuple[int, ...]) -> ShardMap:
    whole = Box.whole("w", (64, 33))
    return ShardMap({"w": (64, 33)}, ranks, lambda rank: [Shard.of_rows(whole, "w")])


def check_dtypes(world: World) -> None:
    values = torch.randn(64, 33, generator=torch.Generator().manual_seed(3))
    bf16, fp32, e4m3, e5m2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
    for have, wire, want in [(fp32, bf16, bf16), (bf16, bf16, fp32), (e4m3, e4m3, e4m3), (fp32, e5m2, e5m2),
                             (torch.bool, torch.bool, torch.bool), (torch.int64, torch.int64, torch.int64)]:
        source, got = {"w": values.to(have)}, {"w": torch.zeros(64, 33, dtype=want)}
        execute(TransferPlan(pairs_map((0,)), pairs_map((1,))), world, source, got, wire_dtype=wire, bucket_bytes=1000)
        if world.rank == 1:
            assert torch.equal(got["w"].float(), values.to(have).to(wire).to(want).float()), (have, wire, want)


def test_every_dtype_travels_and_is_cast_at_the_right_end():
    run_ranks(2, check_dtypes)


class BrokenWork:
    def wait(self) -> None:
        raise RuntimeError("connection closed by peer")


FUSED = {"q": (300, 256), "k": (200, 256), "v": (200, 256), "down": (256, 512)}
STRETCH = 256 * (300 + 200 + 200)  # q, k and v, one below the other


def fused_shards(places: tuple[str, ...]) -> list[Shard]:
    """q, k and v one below the other in each of the places; the down projection, of which columns are cut."""
    rows, shards = 0, []
    for name in "qkv":
        box = Box.whole(name, FUSED[name])
        shards += [Shard.of_rows(box, place, rows) for place in places]
        rows += box.shape[0]
    return [*shards, *(Shard.of_rows(Box("down", (0, lo), (256, lo + 256)), f"down{lo}") for lo in (0, 256))]


def check_stretches(world: World, dtype: torch.dtype, twice: bool) -> tuple[int, int, int]:
    """(messages of fused rows, other messages, most bytes of buffers) where rank 0 sends the same to ranks 1 and 2."""
    whole = [*fused_shards(("here",))[:3], Shard.of_rows(Box.whole("down", FUSED["down"]), "down")]
    mark = Shard.of_rows(Box.whole("mark", (1,)), "mark")  # who has something to send need not pass on
    places = ("there", "too") if twice else ("there",)
    src = ShardMap(FUSED | {"mark": (1,)}, (0, 1, 2), lambda rank: [mark] if rank else [*whole, mark])
    transfer = Transfer(TransferPlan(src, ShardMap(FUSED, (1, 2), lambda rank: fused_shards(places))), world,
                        wire_dtype=torch.float32)
    values = torch.arange(STRETCH + 256 * 512, dtype=dtype)
    got = {name: torch.full((STRETCH,), -1, dtype=dtype) for name in places}
    columns = {f"down{lo}": torch.full((256 * 256,), -1, dtype=dtype) for lo in (0, 256)}
    transfer.round(0, {"here": values[:STRETCH], "down": values[STRETCH:]}, got | columns)
    if world.rank != 0:
        down = values[STRETCH:].view(256, 512)
        assert all(torch.equal(rows, values[:STRETCH]) for rows in got.values())
        assert all(torch.equal(columns[f"down{lo}"].view(256, 256), down[:, lo : lo + 256]) for lo in (0, 256))
    [now] = transfer._rounds
    messages = [message.parts[0].source.strides == (1,) for message in (*now.sends, *now.receives)]
    return messages.count(True), messages.count(False), transfer.stats.peak_buffer_bytes


@pytest.mark.parametrize("twice", [False, True])
def test_a_fused_weight_is_one_message_and_what_two_want_is_packed_once(twice: bool):
    columns, rows = 4 * 256 * 512, 4 * STRETCH
    assert run_ranks(3, check_stretches, torch.float32, twice) == [(2, 4, columns), (1, 2, 0), (1, 2, 0)]
    everything = [rows + columns] * 3  # cast at both ends
    assert run_ranks(3, check_stretches, torch.float64, twice) == list(zip((2, 1, 1), (4, 2, 2), everything))


def fail_to_receive(world: World) -> str:
    transfer = Transfer(TransferPlan(pairs_map((0,)), pairs_map((1,))), world, wire_dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", lambda ops: [BrokenWork() for _ in ops])
        with pytest.raises(TransferError) as caught:
            transfer.round(0, {"w": torch.zeros(64, 33)}, {"w": torch.zeros(64, 33)})
    return str(caught.value)


def test_an_error_names_the_rank_and_the_tensor():
    to, of = run_ranks(2, fail_to_receive)
    assert to == "could not move w to rank 1: connection closed by peer"
    assert of == "could not move w from rank 0: connection closed by peer"


def lose_the_sender(world: World) -> str:
    transfer = Transfer(TransferPlan(pairs_map((0,)), pairs_map((1,))), world, wire_dtype=torch.float32)
    if world.rank == 0:
        world.close()
        return "gone"
    with pytest.raises(TransferError) as caught:
        transfer.round(0, {}, {"w": torch.zeros(64, 33)})
    return str(caught.value)


def test_a_rank_that_has_gone_is_named():
    with LocalRanks(2, timeout_s=20.0) as ranks:
        assert ranks.run(lose_the_sender)[1].startswith("could not move w from rank 0: ")


def refuse(world: World) -> list[str]:
    """What is said of plans and storages that do not fit, on this rank."""
    said = []
    plan = TransferPlan(pairs_map((0,)), pairs_map((1,)))
    for kind, planned, bucket_bytes in [
            (ValueError, TransferPlan(pairs_map((0,)), pairs_map((1, 7))), 64), (ValueError, plan, 7),
            (PeerError, plan if world.rank == 0 else TransferPlan(halves_map((0,)), pairs_map((1,))), 64)]:
        with pytest.raises(kind) as caught:
            Transfer(planned, world, wire_dtype=torch.float32, bucket_bytes=bucket_bytes)
        said.append(str(caught.value))
        world.barrier()
    transfer = Transfer(plan, world, wire_dtype=torch.float32)
    for storages in ({}, {"w": torch.zeros(64 * 33 - 1)}, {"w": torch.zeros(33, 64).T}):
        with pytest.raises(ValueError, match="storages do not fit the plan") as unfit:
            transfer.round(0, storages, storages)
        said.append(str(unfit.value))
    return said


def halves_map(ranks: tuple[int, ...]) -> ShardMap:
    boxes = [Box("w", (row, 0), (row + 32, 33)) for row in (0, 32)]
    return ShardMap({"w": (64, 33)}, ranks, lambda rank: [Shard.of_rows(box, "w", box.lo[0]) for box in boxes])


def test_what_does_not_fit_is_refused_before_anything_moves():
    for rank, said in enumerate(run_ranks(2, refuse)):
        outside, bucket, plan, missing, short, gaps = said
        assert outside == "the plan has ranks [7], of a world of 2"
        assert bucket == "bucket_bytes = 7: two rounds of one element of torch.float32 need 8"
        assert plan.startswith(f"rank {1 - rank} has another plan of what goes between it and rank {rank}: ")
        assert missing.endswith("w is missing")
        assert short.endswith("w of shape (2111,), strides (1,), needs 2112 elements without gaps")
        assert "strides (1, 64)" in gaps


def lose_a_peer(world: World) -> str:
    if world.rank == 0:
        world.close()
        return "gone"
    with pytest.raises(PeerError) as caught:
        swap({0: torch.zeros(3)}, {0: torch.zeros(3)}, "checksums")
    return str(caught.value)


def test_who_does_not_answer_is_named():
    with LocalRanks(2, timeout_s=20.0) as ranks:
        assert ranks.run(lose_a_peer)[1].startswith("could not exchange checksums with rank 0: ")


def check_order_of_reads(world: World) -> list[frozenset[str]]:
    """Eight shares of which each half of the rounds reads its own."""
    def shards_of(rank: int) -> list[Shard]:
        return [Shard.of_rows(Box("w", (8 * part, 0), (8 * part + 8, 33)), f"share.{part}") for part in range(8)]
    shares = ShardMap({"w": (64, 33)}, (0,), shards_of)
    transfer = Transfer(TransferPlan(shares, pairs_map((0, 1))), world, wire_dtype=torch.float32,
                        bucket_bytes=2 * 4 * 2 * 8 * 33)
    got, have = {"w": torch.full((64, 33), -1.0)}, {f"share.{part}": torch.full((8, 33), -1.0) for part in range(8)}
    reads = [transfer.sources(number) for number in range(transfer.num_rounds)]
    for number, names in enumerate(reads):
        for name in names:
            have[name].fill_(float(name.removeprefix("share.")))  # not before it is asked for
        transfer.round(number, have, got)
    assert torch.equal(got["w"], torch.arange(8.0).repeat_interleave(8)[:, None].expand(64, 33))
    return reads


def test_a_source_is_read_no_sooner_than_said():
    reads, nothing = run_ranks(2, check_order_of_reads)
    assert reads == [{f"share.{2 * number}", f"share.{2 * number + 1}"} for number in range(4)]
    assert set(nothing) == {frozenset()}
