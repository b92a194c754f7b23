"""The rivals of `bench reshard` put every bit in its place, what is wrong is named, and our bounds are judged."""

from dataclasses import replace

import pytest
import torch

from hybridflow.bench import reshard
from hybridflow.bench.reshard import CHECKPOINT, DTENSOR, GATHER, MEGATRON, OURS, PACKED, WIRE, Measured
from hybridflow.bench.reshard_case import MODEL, Case, canonical_weights, empty_storages, filled, first_wrong, plain
from hybridflow.parallel.mesh import Grid, Layout
from tests.ranks import run_ranks

TINY = replace(MODEL, vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=4, num_heads=8, num_kv_heads=4,
               head_dim=2)


@pytest.mark.parametrize("case", [replace(case, model=TINY) for case in reshard.CASES[:2]], ids=str)
def test_all_rivals_agree_and_are_timed(case: Case, tmp_path):
    measured = run_ranks(4, reshard.race, case, 2, 3, str(tmp_path))
    reshard.require_right(case, measured)
    for one in measured:
        expected = {OURS, PACKED, GATHER, CHECKPOINT}
        expected |= set() if one.notes else {MEGATRON}
        expected |= {DTENSOR} if case.train.pp == 1 else set()
        assert set(one.clocked) == expected
        assert all(len(rounds) == 2 for rounds in one.clocked.values())
        assert {name: len(rounds) for name, rounds in one.beside_wire.items()} == {OURS: 3, WIRE: 3}
        assert one.received_bytes[OURS] == one.received_bytes[PACKED] == one.lower_bound_bytes
        assert one.own_bytes[OURS] <= one.own_bytes[PACKED] == one.own_bytes[GATHER]
    for name in (MEGATRON, DTENSOR, GATHER):
        if name in measured[0].received_bytes:
            assert sum(one.received_bytes[name] for one in measured) >= sum(one.lower_bound_bytes for one in measured)


def test_a_wrong_bit_is_named():
    case = Case(Layout(tp=2), Layout(dp=2), TINY)
    weights = canonical_weights(case.shapes)
    for of in (case.train_map, plain(case.train_map)):
        storages = filled(of.shards(1), weights)
        assert first_wrong(of.shards(1), storages, weights) is None
        shard = next(shard for shard in of.shards(1) if "layers.2.self_attn.k_proj" in shard.box.name)
        shard.view(storages)[3, 5].view(torch.int16).bitwise_xor_(1)
        assert first_wrong(of.shards(1), storages, weights) == f"{shard.box.name} (4, 0) to (8, 16)"
    assert "embed_tokens" in first_wrong(of.shards(1), empty_storages(of.shards(1)), weights)
    with pytest.raises(reshard.WrongWeights, match="tp2 -> dp2: ours, packed on rank 1: here"):
        reshard.require_right(case, [measured(), measured(wrong={PACKED: "here"})])


def test_missed_bounds_are_named():
    case = reshard.CASES[0]
    assert reshard.missed(case, [measured(), measured()]) == []
    assert "megatron-core p2p is faster" in only_fault(measured(seconds={MEGATRON: 0.9}))
    assert "all-gather takes 1.90" in only_fault(measured(seconds={GATHER: 1.9}))
    assert "1.43 of the bare wire" in only_fault(measured(seconds={WIRE: 0.7}))
    assert "lower bound" in only_fault(measured(moved={PACKED: 11}))
    assert "megatron-core 9" in reshard.missed(case, [measured(moved={MEGATRON: 9})])[0]


def test_megatron_interleaves_the_rows_of_heads():
    from hybridflow.bench.megatron_reshard import megatron_map

    case = Case(Layout(tp=2, pp=2), Layout(dp=4), TINY)
    shards = megatron_map(case, Grid.of(case.train)).shards(3)  # the second half of the heads, layers 2 and 3
    fused = [(shard.box.name.split(".")[-2], shard.box.lo[0], shard.offset // 16) for shard in shards
             if shard.storage == "decoder.layers.1.self_attention.linear_qkv.weight"]
    assert fused == [("q_proj", 8, 0), ("k_proj", 4, 4), ("v_proj", 4, 6), ("q_proj", 12, 8), ("k_proj", 6, 12),
                     ("v_proj", 6, 14)]
    assert {shard.box.name.split(".")[2] for shard in shards if "layers.1." in shard.storage} == {"3"}


def measured(seconds: dict | None = None, moved: dict | None = None, wrong: dict | None = None) -> Measured:
    of = {OURS: 1.0, PACKED: 1.1, GATHER: 2.5, MEGATRON: 1.2, CHECKPOINT: 3.0, WIRE: 0.9} | (seconds or {})
    received = dict.fromkeys(of.keys() - {WIRE}, 10) | (moved or {})
    clocked = {name: [(wall, wall)] * 3 for name, wall in of.items()}
    beside_wire = {OURS: clocked[OURS], WIRE: clocked.pop(WIRE)}
    return Measured(clocked, beside_wire, received, dict.fromkeys(received, 0), wrong or {}, [], lower_bound_bytes=10)


def only_fault(of: Measured) -> str:
    [fault] = [fault for fault in reshard.missed(reshard.CASES[0], [of]) if "moves" not in fault]
    return fault
