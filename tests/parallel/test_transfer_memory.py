"""A transfer takes its bucket and little more, however large the model; and nothing where a rank has all it wants."""

from __future__ import annotations

import pytest
import torch

from hybridflow.bench.live_bytes import LiveBytes
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.plan import TransferPlan
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.transfer import Transfer
from hybridflow.parallel.world import World
from tests.ranks import run_ranks

BUCKET_BYTES = 2**18
CONSTANT_BYTES = 2**12  # what the two ends tell each other
SIDE = 1024  # of the matrix: 4 MiB in fp32, 16 buckets
VECTOR = 2**18  # 1 MiB, 4 buckets
SHAPES = {"matrix": (SIDE, SIDE), "vector": (VECTOR,)}


def halves(dim: int) -> ShardMap:
    """The matrix cut in two along `dim`, the vector in halves, on ranks 0 and 1."""
    def shards_of(rank: int) -> list[Shard]:
        lo, hi = [0, 0], [SIDE, SIDE]
        lo[dim], hi[dim] = rank * SIDE // 2, (rank + 1) * SIDE // 2
        vector = Box("vector", (rank * VECTOR // 2,), ((rank + 1) * VECTOR // 2,))
        return [Shard.of_rows(Box("matrix", tuple(lo), tuple(hi)), "matrix"), Shard.of_rows(vector, "vector")]
    return ShardMap(SHAPES, (0, 1), shards_of)


def full(ranks: tuple[int, ...]) -> ShardMap:
    return ShardMap(SHAPES, ranks, lambda rank: [Shard.of_rows(Box.whole(n, s), n) for n, s in SHAPES.items()])


def full_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {"matrix": torch.arange(SIDE * SIDE).remainder(251).view(SIDE, SIDE).to(dtype),
            "vector": torch.arange(VECTOR).remainder(241).to(dtype)}


def storages(shard_map: ShardMap, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    values = full_tensors(dtype)
    return {s.storage: values[s.box.name][s.box.slices].contiguous() for s in shard_map.shards(rank)}


def measure(world: World, src: ShardMap, dst: ShardMap, have: torch.dtype, wire: torch.dtype) -> tuple[int, int, int]:
    """(most bytes taken, buffer bytes counted, bytes received), once all is found to be right."""
    source, wanted = storages(src, world.rank, have), storages(dst, world.rank, torch.float32)
    got = {name: torch.full_like(values, -1) for name, values in wanted.items()}
    with LiveBytes() as live:
        transfer = Transfer(TransferPlan(src, dst), world, wire_dtype=wire, bucket_bytes=BUCKET_BYTES)
        for _ in range(2):
            for number in range(transfer.num_rounds):
                transfer.round(number, source, got)
    assert live.now <= CONSTANT_BYTES, "buffers are given back"
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    return live.peak, transfer.stats.peak_buffer_bytes, transfer.stats.received_bytes


def measure_case(world: World, case: str) -> tuple[int, int, int]:
    f32, bf16 = torch.float32, torch.bfloat16
    src, dst, have, wire = {
        "rows to columns": (halves(0), halves(1), f32, f32),
        "columns to both": (halves(1), full((0, 1)), f32, f32),
        "cast on the way": (halves(0), full((0, 1)), f32, bf16),
        "in place": (full((0,)), full((1,)), f32, f32),
        "layouts agree": (halves(1), halves(1), f32, f32),
    }[case]
    return measure(world, src, dst, have, wire)


@pytest.mark.parametrize("case", ["rows to columns", "columns to both", "cast on the way"])
def test_a_model_twenty_times_the_bucket_takes_the_bucket(case: str):
    assert 4 * (SIDE * SIDE + VECTOR) == 20 * BUCKET_BYTES
    for peak, counted, received in run_ranks(2, measure_case, case):
        assert received > 3 * BUCKET_BYTES
        assert BUCKET_BYTES // 4 < peak <= BUCKET_BYTES + CONSTANT_BYTES
        assert counted <= BUCKET_BYTES


@pytest.mark.parametrize("case", ["in place", "layouts agree"])
def test_what_lies_as_it_travels_takes_nothing(case: str):
    for peak, counted, _ in run_ranks(2, measure_case, case):
        assert peak <= CONSTANT_BYTES and counted == 0


def lend_and_measure(world: World) -> tuple[int, int, int]:
    """Both maps' storages are the same memory."""
    here = storages(halves(1), world.rank, torch.float32)
    versions = {name: values._version for name, values in here.items()}
    with LiveBytes() as live:
        transfer = Transfer(TransferPlan(halves(1), halves(1)), world, wire_dtype=torch.float32)
        transfer.round(0, here, here)
    written = sum(values._version - versions[name] for name, values in here.items())
    return live.peak, transfer.stats.received_bytes, written


def test_a_weight_that_is_the_training_weight_is_not_touched():
    assert run_ranks(2, lend_and_measure) == [(0, 0, 0), (0, 0, 0)]
