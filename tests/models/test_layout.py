"""Cuts of a model over ranks, by hand."""

from dataclasses import replace

import pytest

from hybridflow.models.config import Family, ModelConfig
from hybridflow.models.layout import check_layout, chunk_layers, require_layout, split_heads, sum_segments
from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.schedules.chunks import ChunkOrder, Chunks

CONFIG = ModelConfig(Family.LLAMA, 64, 32, 48, num_layers=5, num_heads=8, num_kv_heads=2, head_dim=4)


def test_chunk_layers():
    assert chunk_layers(5, Chunks(2)) == (range(0, 3), range(3, 5))
    assert chunk_layers(5, Chunks()) == (range(5),)
    assert chunk_layers(5, Chunks(3), [1, 3, 1]) == (range(0, 1), range(1, 4), range(4, 5))
    for order in ChunkOrder:  # chunks are numbered through the model, whatever stage they lie on
        assert chunk_layers(6, Chunks(2, 2, order)) == (range(0, 2), range(2, 4), range(4, 5), range(5, 6))
    assert chunk_layers(5, Chunks(2, 2), [1, 1, 1, 2])[3] == range(3, 5)


@pytest.mark.parametrize(("chunks", "counts", "words"), [
    (Chunks(6), None, "pp 6 must be at most num_layers 5"),
    (Chunks(2, 3), None, "pp 2 x vpp 3 = 6 chunks must be at most num_layers 5"),
    (Chunks(2), [2, 2], "sum to num_layers 5"),
    (Chunks(2), [5, 0], "positive"),
    (Chunks(2), [1, 3, 1], "pp = 2 entries"),
    (Chunks(2, 2), [2, 3], "pp x vpp = 4 entries"),
])
def test_chunk_layers_refused(chunks, counts, words):
    with pytest.raises(ValueError, match=words):
        chunk_layers(5, chunks, counts)


def test_heads_of_a_rank():
    """8 query and 2 kv heads: at tp 4 two ranks share a kv head, at tp 8 four do."""
    assert [split_heads(CONFIG, 2, i).kv for i in range(2)] == [(0, 1), (1, 2)]
    assert [split_heads(CONFIG, 4, i).kv for i in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [split_heads(CONFIG, 4, i).q for i in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [split_heads(CONFIG, 8, i).kv[0] for i in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert split_heads(CONFIG, 8, 0).kv_replicas == 4


def test_all_faults_at_once():
    assert check_layout(CONFIG, Layout(tp=4, pp=5)) == []
    faults = check_layout(CONFIG, Layout(tp=3, pp=6))
    assert len(faults) == 3 and "tp 3 must divide num_heads 8: use 1, 2, 4, 8" in faults[1]
    assert "num_kv_heads 2" in faults[2]
    with pytest.raises(ValueError, match="pp 6.*num_heads.*num_kv_heads"):
        require_layout(CONFIG, Layout(tp=3, pp=6))
    assert check_layout(CONFIG, Layout(pp=3), chunks=Chunks(3, 2)) == [
        "pp 3 x vpp 2 = 6 chunks must be at most num_layers 5"]
    assert check_layout(CONFIG, Layout(pp=2), chunks=Chunks(2, 2)) == []
    assert "intermediate_size 50" in check_layout(replace(CONFIG, intermediate_size=50), Layout(tp=4))[0]
    assert "num_kv_heads 3 must divide num_heads 8" in check_layout(replace(CONFIG, num_kv_heads=3), Layout())[0]
    assert "vocab_size 3" in check_layout(replace(CONFIG, vocab_size=3), Layout(tp=4))[0]


def test_tensor_ranks_sum_the_parts_of_one_rank():
    assert [sum_segments(CONFIG, tp) for tp in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert sum_segments(CONFIG, 3) == sum_segments(CONFIG, 16) == 1
    odd = replace(CONFIG, num_heads=6, num_kv_heads=3)
    assert [sum_segments(odd, tp) for tp in (1, 2, 3, 6)] == [2, 1, 1, 1]
    assert sum_segments(replace(CONFIG, intermediate_size=44)) == 4
