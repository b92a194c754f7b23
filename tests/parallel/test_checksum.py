"""Checksums add up over any cut, and every planted fault is named: tensor, receiving rank, sending rank."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridflow.models.config import Head
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.checksum import IntegrityError, TransferCheck, checksum, plan_faults, sampled
from hybridflow.parallel.mesh import Grid, Layout
from hybridflow.parallel.nodes import Nodes
from hybridflow.parallel.plan import Copy, TransferPlan
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.transfer import execute
from hybridflow.parallel.world import World
from tests.engine.models import tiny_model
from tests.ranks import run_ranks

MODEL = tiny_model()
TRAIN, GENERATION = Layout(2, 2, 1), Layout(2, 1, 2)
UP, GATE, QUERY = (f"model.layers.1.{name}.weight" for name in ("mlp.up_proj", "mlp.gate_proj", "self_attn.q_proj"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_checksums_of_disjoint_boxes_add_up_to_the_whole(dtype: torch.dtype):
    shape = (5, 4, 6)
    whole = Box.whole("w", shape)
    values = (torch.arange(120) % 113 + 1).view(shape).to(dtype)
    hole = Box("w", (1, 0, 2), (4, 3, 5))
    total = sum(checksum(values[part.slices], part, shape) for part in [hole, *whole.subtract(hole)])
    assert torch.equal(total, checksum(values, whole, shape))


def test_a_checksum_sees_places_and_bits():
    shape, whole = (4, 3), Box.whole("w", (4, 3))
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values[2, 1] = float("nan")
    other = {"rows": values[[1, 0, 2, 3]], "columns": values[:, [0, 2, 1]],
             "signs": values * torch.tensor([1, 1, -1])}
    flipped = values.clone()
    flipped.view(torch.int64)[3, 2] ^= 1
    sums = {name: checksum(each, whole, shape).item() for name, each in {**other, "a bit": flipped}.items()}
    assert checksum(values.clone(), whole, shape).item() == checksum(values.T.contiguous().T, whole, shape).item()
    assert checksum(values, whole, shape).item() not in sums.values() and len(set(sums.values())) == len(sums)


def test_large_values_take_little_memory_at_a_time(monkeypatch: pytest.MonkeyPatch):
    values = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    at_once = checksum(values, Box.whole("w", (64, 8)), (64, 8))
    monkeypatch.setattr("hybridflow.parallel.checksum.AT_ONCE", 20)
    assert torch.equal(checksum(values, Box.whole("w", (64, 8)), (64, 8)), at_once)


def test_every_tensor_has_its_turn_in_the_sample():
    names = [f"t{i}" for i in range(37)]
    seen = [sampled(names, version) for version in range(16)]
    assert set().union(*seen) == set(names) and sum(map(len, seen)) == len(names)


def maps() -> tuple[ShardMap, ShardMap]:
    return tuple(decoder_shard_map(MODEL, Grid.of(layout), Head.LANGUAGE_MODEL) for layout in (TRAIN, GENERATION))


def changed(shard_map: ShardMap, change: Callable[[Shard], Shard]) -> ShardMap:
    return ShardMap(shard_map.shapes, shard_map.ranks, lambda rank: [change(s) for s in shard_map.shards(rank)],
                    shard_map.kind_of)


def swap_halves(shard: Shard) -> Shard:
    """Gate lies where up should, and up where gate should."""
    if shard.box.name not in (UP, GATE):
        return shard
    return replace(shard, offset=shard.box.numel if shard.offset == 0 else 0)


def cut_raw(shard: Shard) -> Shard:
    """Queries are taken one head's rows too late, as in a fused matrix that is cut without regard to its parts."""
    if shard.box.name != QUERY:
        return shard
    return replace(shard, offset=shard.offset + MODEL.head_dim * MODEL.hidden_size)


def storages(shard_map: ShardMap, rank: int, *, filled: bool) -> dict[str, Tensor]:
    """Flat storages; each canonical element has a value of its own."""
    ends: dict[str, int] = {}
    for shard in shard_map.shards(rank):
        last = sum((size - 1) * stride for size, stride in zip(shard.box.shape, shard.strides))
        ends[shard.storage] = max(ends.get(shard.storage, 0), shard.offset + last + 1)
    made = {name: torch.full((end,), float("nan"), dtype=torch.float64) for name, end in ends.items()}
    for place, (name, shape) in enumerate(shard_map.shapes.items()):
        whole = torch.arange(Box.whole(name, shape).numel, dtype=torch.float64).view(shape) + 1000.0 * place
        for shard in shard_map.shards(rank):
            if filled and shard.box.name == name:
                shard.view(made).copy_(whole[shard.box.slices])
    return made


def moved(world: World, fault: str) -> str:
    """What the check of a transfer with a planted fault says on this rank."""
    src, dst = maps()
    wrong_src = changed(src, cut_raw) if fault == "raw qkv" else src
    wrong_dst = changed(dst, swap_halves) if fault == "swapped halves" else dst
    plan = TransferPlan(wrong_src, wrong_dst)
    have, want = storages(src, world.rank, filled=True), storages(dst, world.rank, filled=False)
    check = TransferCheck(src, dst, plan, world, torch.float64)
    execute(plan, world, have, want, wire_dtype=torch.float64)
    if fault == "flipped bit" and world.rank == 1:
        shard = next(s for s in dst.shards(1) if s.box.name == QUERY)
        want[shard.storage].view(torch.int64)[shard.offset + 5] ^= 1 << 40
    version = 2 if fault == "stale version" and world.rank == 3 else 3
    try:
        check.verify(have, want, version=version)
    except IntegrityError as error:
        return str(error)
    return ""


def test_a_right_transfer_passes():
    assert run_ranks(4, moved, "none") == [""] * 4


@pytest.mark.parametrize("fault, name", [("swapped halves", UP), ("swapped halves", GATE), ("raw qkv", QUERY)])
def test_a_wrong_map_is_found_on_every_rank(fault: str, name: str):
    for rank, said in enumerate(run_ranks(4, moved, fault)):
        assert name in said and f"version 3 are wrong on rank {rank}" in said and "is not what rank" in said


def test_all_ranks_hear_of_a_flipped_bit_on_one():
    said = run_ranks(4, moved, "flipped bit")
    assert "are wrong on rank 1: " in said[1]
    assert all(f"are wrong on rank 1, though not on rank {rank}: rank 1 says that" in said[rank] for rank in (0, 2, 3))
    assert all(QUERY in each and each.count("is not what rank") == 1 for each in said)


def test_a_stale_version_is_named_by_all():
    said = run_ranks(4, moved, "stale version")
    assert any("rank 3 sent model." in each and "of version 2" in each for each in said[:3])
    assert all("rank 3 has version 2, the newest is 3" in each for each in said)
    assert not any("is not what" in each for each in said)


def kept(world: World, ranks: tuple[int, ...], stale: int | None) -> tuple[str, tuple[int, ...]]:
    """What the check says of weights that all of `ranks` keep, and who is at fault. No others take part in it."""
    if world.rank not in ranks:
        return "", ()
    replicas = decoder_shard_map(MODEL, Grid(Layout(dp=len(ranks)), ranks), Head.LANGUAGE_MODEL)
    plan = TransferPlan(replicas, replicas)
    assert not plan.wires(world.rank)
    have = storages(replicas, world.rank, filled=True)
    try:
        TransferCheck(replicas, replicas, plan, world, torch.float64).verify(
            have, have, version=6 if world.rank == stale else 7)
    except IntegrityError as error:
        return str(error), error.ranks
    return "", ()


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 2, 3), (1, 2), (2,)], ids=str)
def test_a_stale_rank_is_found_that_sends_and_receives_nothing(ranks: tuple[int, ...]):
    assert run_ranks(4, kept, ranks, None) == [("", ())] * 4
    if len(ranks) > 1:
        told = run_ranks(4, kept, ranks, 2)
        for said, at_fault in (told[rank] for rank in ranks):
            assert "rank 2 has version 6, the newest is 7" in said and at_fault == (2,)


def last_passed_on(plan: TransferPlan) -> Copy:
    """Of the copies of the last hop, the first of `UP`."""
    hop = max(copy.hop for copy in plan.copies)
    return next(copy for copy in plan.copies if copy.hop == hop > 0 and copy.box.name == UP)


def passed_on(world: World, target: tuple[int, ...], spoil: str) -> str:
    """What the check says of weights of which some are passed on, after a bit of one of those has flipped: at the rank
    that has got it, or at the one that has passed it on.
    """
    src, dst = (decoder_shard_map(MODEL, Grid(Layout(dp=len(ranks)), ranks), Head.LANGUAGE_MODEL)
                for ranks in ((0,), target))
    plan = TransferPlan(src, dst, Nodes(2))
    have, want = storages(src, world.rank, filled=True), storages(dst, world.rank, filled=False)
    check = TransferCheck(src, dst, plan, world, torch.float64)
    execute(plan, world, have, want, wire_dtype=torch.float64)
    copy = last_passed_on(plan)
    spoilt, shard = {"nothing": (None, None), "dest": (copy.dest, copy.dst_shards[0]),
                     "source": (copy.source, copy.src_shard)}[spoil]
    if world.rank == spoilt:
        shard.view(want, copy.box).view(torch.int64)[(0,) * len(copy.box.shape)] ^= 1
    try:
        check.verify(have, want, version=1)
    except IntegrityError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("target", [(0, 1, 2, 3), (2, 3)], ids=str)
def test_what_is_passed_on_is_checked_by_hops(target: tuple[int, ...]):
    """Rank 0 sends to rank 2 of the other node, which passes on to rank 3; rank 1 may be outside the plan."""
    members = sorted({0, *target})
    assert run_ranks(4, passed_on, target, "nothing") == [""] * 4
    said = run_ranks(4, passed_on, target, "dest")
    assert [rank for rank in range(4) if said[rank]] == members
    assert "wrong on rank 3: " in said[3] and "wrong on rank 3, though not on rank 0: rank 3 says that" in said[0]
    assert all(f"{UP}[(0, 0):(24, 16)] is not what rank 2 has" in said[rank] for rank in members)
    said = run_ranks(4, passed_on, target, "source")
    assert [rank for rank in range(4) if said[rank]] == members
    assert f"{UP}[(0, 0):(24, 16)] is not what rank 0 has" in said[2] and "is not what rank 2 has" in said[3]
    assert "wrong on ranks 2, 3, though not on rank 0: rank 2 says that" in said[0]


class Dropped(TransferPlan):
    """A plan that forgets a tensor, or brings it twice."""

    times = 0

    def of_rank(self, rank: int) -> tuple[Copy, ...]:
        return tuple(copy for copy in super().of_rank(rank) for _ in range(self.times if copy.box.name == UP else 1))


def test_a_dropped_or_doubled_tensor_is_found_in_the_plan(monkeypatch: pytest.MonkeyPatch):
    src, dst = maps()
    assert plan_faults(TransferPlan(src, dst), src, dst, 0) == []
    assert re.match(rf"{UP}\[.*never comes to rank 0", plan_faults(Dropped(src, dst), src, dst, 0)[0])
    monkeypatch.setattr(Dropped, "times", 2)
    assert re.match(rf"{UP}\[.*comes to rank 0 twice", plan_faults(Dropped(src, dst), src, dst, 0)[0])


def check_with_a_wrong_plan(world: World) -> str:
    src, dst = maps()
    with pytest.raises(IntegrityError) as raised:
        TransferCheck(src, dst, (Dropped if world.rank == 0 else TransferPlan)(src, dst), world, torch.float64)
    assert raised.value.ranks == (0,)
    return str(raised.value)


def test_every_rank_hears_of_a_wrong_plan():
    first, *others = run_ranks(4, check_with_a_wrong_plan)
    assert re.match(rf"the plan is wrong: {UP}\[.*never comes to rank 0", first)
    assert all(re.match(rf"the plan is wrong: rank 0 says that {UP}\[.*never comes", said) for said in others)


def test_a_copy_from_a_rank_that_has_nothing_is_found():
    src, dst = maps()
    swapped = ShardMap(src.shapes, src.ranks, lambda rank: list(src.shards((rank + 2) % 4)))
    assert "which does not have it" in plan_faults(TransferPlan(swapped, dst), src, dst, 0)[0]
