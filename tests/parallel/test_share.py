from dataclasses import replace

import pytest
import torch

from hybridflow.models.config import Family, Head, ModelConfig
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.mesh import Grid, Layout
from hybridflow.parallel.plan import lower_bound_numel
from hybridflow.parallel.schedules.chunks import ChunkOrder, Chunks
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.share import (
    REST,
    TRAINING,
    Alias,
    TilePlace,
    rest_shapes,
    shared_map,
    tiling,
    with_training,
)
from tests.parallel.labels import fill, labels, storages_of

LLAMA = ModelConfig(Family.LLAMA, vocab_size=37, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4,
                    num_kv_heads=2, head_dim=8, max_position_embeddings=64)
ALL = replace(LLAMA, family=Family.QWEN2, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True,
              tie_word_embeddings=True)
LAYOUTS = {
    "tp1dp4": (Layout(dp=4), None), "tp2dp2": (Layout(tp=2, dp=2), None), "tp4": (Layout(tp=4), None),
    "pp2dp2": (Layout(pp=2, dp=2), None), "pp4": (Layout(pp=4), None), "tp2pp2": (Layout(tp=2, pp=2), None),
    "tp2pp2-vpp2": (Layout(tp=2, pp=2), Chunks(2, 2)), "pp2dp2-v": (Layout(pp=2, dp=2), Chunks(2, 2, ChunkOrder.V)),
}
GENERATION = ("tp1dp4", "tp2dp2", "tp4")


def map_of(config, key):
    layout, chunks = LAYOUTS[key]
    return decoder_shard_map(config, Grid.of(layout), Head.LANGUAGE_MODEL, chunks)


def put_together(place, storages, width):
    """A generation storage from its tiles."""
    if isinstance(place, Alias):
        return storages[place.storage][place.offset:place.offset + place.size]
    whole = torch.full((max(hi for tile in place for _, hi in tile.outputs), width), -1)
    for tile in place:
        rows = storages[tile.storage].as_strided(tile.shape, (tile.row_stride, 1), tile.offset)
        for (lo, hi), part in zip(tile.outputs, rows.split([hi - lo for lo, hi in tile.outputs]), strict=True):
            assert (whole[lo:hi, slice(*tile.inputs)] == -1).all()
            whole[lo:hi, slice(*tile.inputs)] = part
    return whole.flatten()


@pytest.mark.parametrize("config", [LLAMA, ALL], ids=["llama", "all"])
@pytest.mark.parametrize("generation", GENERATION)
@pytest.mark.parametrize("train", LAYOUTS)
def test_training_memory_and_the_rest_make_the_generation_storages(train, generation, config):
    train, generation = map_of(config, train), map_of(config, generation)
    shared = shared_map(train, generation)
    for rank in range(4):
        trained = storages_of(train.shards(rank))
        fill(trained, train.shards(rank), train.shapes)
        here = {f"{TRAINING}{name}": tensor for name, tensor in trained.items()}
        rest = {name: torch.full(shape, -1) for name, shape in rest_shapes(train, generation, rank).items()}
        for shard in shared.shards(rank):
            if shard.storage in here:
                assert torch.equal(shard.view(here), labels(shard.box, train.shapes))
        fill(rest, [shard for shard in shared.shards(rank) if shard.storage.startswith(REST)], train.shapes)
        assert all((tensor >= 0).all() for tensor in rest.values())
        want = storages_of(generation.shards(rank))
        fill(want, generation.shards(rank), train.shapes)
        places = tiling(train, generation, rank)
        assert places.keys() == want.keys()
        width = {shard.storage: shard.strides[0] for shard in generation.shards(rank)}
        for name, place in places.items():
            assert torch.equal(put_together(place, here | rest, width[name]), want[name]), name


@pytest.mark.parametrize("generation", GENERATION)
@pytest.mark.parametrize("train", LAYOUTS)
def test_own_memory_of_matrices_is_what_is_received(train, generation):
    train, generation = map_of(LLAMA, train), map_of(LLAMA, generation)  # its vectors are whole on every tensor rank
    for rank in range(4):
        own = sum(size for size, in rest_shapes(train, generation, rank).values())
        assert own == lower_bound_numel(train, generation, rank)


@pytest.mark.parametrize("layout", GENERATION)
def test_equal_layouts_need_no_memory_and_no_tiles(layout):
    train = map_of(ALL, layout)
    for rank in range(4):
        assert rest_shapes(train, train, rank) == {}
        for name, place in tiling(train, train, rank).items():
            assert isinstance(place, Alias) or len(place) == 1 and len(place[0].outputs) == 1
            assert (place if isinstance(place, Alias) else place[0]).storage == f"{TRAINING}{name}"


def test_a_fused_matrix_is_one_tile_of_training_and_one_of_the_rest():
    places = tiling(map_of(LLAMA, "tp2dp2"), map_of(LLAMA, "tp1dp4"), 0)
    qkv, out = "layers.0.attention.qkv.weight", "layers.0.attention.out.weight"
    assert places[qkv] == (TilePlace(f"{TRAINING}{qkv}", 0, 32, ((0, 16), (32, 40), (48, 56)), (0, 32)),
                           TilePlace(f"{REST}{qkv}", 0, 32, ((16, 32), (40, 48), (56, 64)), (0, 32)))
    assert places[out] == (TilePlace(f"{TRAINING}{out}", 0, 16, ((0, 32),), (0, 16)),
                           TilePlace(f"{REST}{out}", 0, 16, ((0, 32),), (16, 32)))


def test_columns_from_several_ranks_are_contiguous_one_by_one():
    train, generation = map_of(LLAMA, "tp4"), map_of(LLAMA, "tp1dp4")
    storage = f"{REST}layers.2.mlp.down.weight"
    down = [shard for shard in shared_map(train, generation).shards(1) if shard.storage == storage]
    assert [(shard.box.lo[1], shard.box.hi[1], shard.offset, shard.strides) for shard in down] == [
        (0, 12, 0, (12, 1)), (24, 36, 384, (12, 1)), (36, 48, 768, (12, 1))]


def test_ranks_outside_training_have_all_of_it_in_their_own_memory():
    train = decoder_shard_map(LLAMA, Grid.of(Layout(tp=2)), Head.LANGUAGE_MODEL)
    generation = decoder_shard_map(LLAMA, Grid(Layout(dp=2), (2, 3)), Head.LANGUAGE_MODEL)
    shared = shared_map(train, generation)
    assert shared.ranks == (2, 3) and len(shared.kinds) == 1
    assert all(shard.storage.startswith(REST) for shard in shared.shards(2))


@pytest.mark.parametrize("generation", GENERATION)
@pytest.mark.parametrize("train", LAYOUTS)
def test_with_training_every_shard_is_there_once(train, generation):
    train, generation = map_of(ALL, train), map_of(ALL, generation)
    both = with_training(shared_map(train, generation), train)
    for rank in range(4):
        shards = both.shards(rank)
        storages = storages_of(shards)
        fill(storages, shards, train.shapes)
        in_training = [shard for shard in shards if shard.storage.startswith(TRAINING)]
        assert sum(shard.box.numel for shard in in_training) == sum(s.box.numel for s in train.shards(rank))
        for shard in train.shards(rank):
            assert torch.equal(shard.view({shard.storage: storages[f"{TRAINING}{shard.storage}"]}),
                               labels(shard.box, train.shapes))


def test_with_training_leaves_packed_destinations_as_they_are():
    box = Box("w", (0, 0), (4, 2))
    train = ShardMap({"w": (4, 2)}, (0, 1), lambda rank: [Shard.of_rows(box, "w")])
    dst = ShardMap({"w": (4, 2)}, (1, 2), lambda rank: [Shard.of_rows(box, "packed")])
    both = with_training(dst, train)
    assert both.ranks == (1, 2, 0)
    assert [[shard.storage for shard in both.shards(rank)] for rank in range(3)] == [
        [f"{TRAINING}w"], ["packed", f"{TRAINING}w"], ["packed"]]
