"""A stage that is lent training weights and the rest samples what a stage with a copy of its own samples."""

from dataclasses import replace

import pytest
import torch

from hybridflow.generation.engine import Generator
from hybridflow.generation.records import SamplingParams
from hybridflow.generation.shared_weights import TILED, lend, take_back
from hybridflow.models.config import Family, Head
from hybridflow.models.init import init_weights
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel.mesh import Grid, Layout
from hybridflow.parallel.schedules.chunks import ChunkOrder, Chunks
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.share import REST, TRAINING, rest_shapes, shared_map, tiling
from tests.generation.small_model import CONFIG, assert_same, make_generator, make_prompts
from tests.parallel.labels import storages_of
from tests.ranks import run_ranks

CONFIG = replace(CONFIG, num_layers=4)
CONFIGS = {
    "llama": CONFIG,
    "biases-norms-tied": replace(CONFIG, family=Family.QWEN2, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True,
                                 tie_word_embeddings=True),
    "one-kv-head": replace(CONFIG, num_kv_heads=1, qkv_bias=True),
}
TRAIN = {
    "tp4": (Layout(tp=4), None), "tp2pp2": (Layout(tp=2, pp=2), None), "pp4": (Layout(pp=4), None),
    "tp2dp2": (Layout(tp=2, dp=2), None), "dp4": (Layout(dp=4), None),
    "tp2pp2-vpp2": (Layout(tp=2, pp=2), Chunks(2, 2)), "pp2dp2-v": (Layout(pp=2, dp=2), Chunks(2, 2, ChunkOrder.V)),
}
PARAMS = SamplingParams(max_new_tokens=3)
PROMPTS = make_prompts([3, 9])


def memory(train: ShardMap, generation: ShardMap, rank: int, config, dtype) -> dict[str, torch.Tensor]:
    """What a rank has: its training storages and the rest, both with the weights of seed 0 and else NaN."""
    held = storages_of(train.shards(rank))
    trained = {name: torch.full(tensor.shape, torch.nan, dtype=dtype) for name, tensor in held.items()}
    init_weights(trained, train, rank, 0, config)
    rest = {name: torch.full(shape, torch.nan, dtype=dtype)
            for name, shape in rest_shapes(train, generation, rank).items()}
    shared = shared_map(train, generation)
    own = ShardMap(shared.shapes, shared.ranks,
                   lambda rank: [shard for shard in shared.shards(rank) if shard.storage.startswith(REST)])
    init_weights(rest, own, rank, 0, config)
    return {f"{TRAINING}{name}": tensor for name, tensor in trained.items()} | rest


def borrow(generator: Generator, train: str, layout: Layout, rank: int, config, dtype) -> None:
    train_layout, chunks = TRAIN[train]
    held = decoder_shard_map(config, Grid.of(train_layout), Head.LANGUAGE_MODEL, chunks)
    wanted = decoder_shard_map(config, Grid.of(layout), Head.LANGUAGE_MODEL)
    lend(generator.stage, tiling(held, wanted, rank), memory(held, wanted, rank, config, dtype))


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("train", TRAIN)
def test_a_whole_model_on_each_rank(train, family):
    config = CONFIGS[family]
    want = make_generator(config=config).generate(PROMPTS, PARAMS, seed=0)
    generator = make_generator(config=config, owns_weights=False)
    for rank in (0, 3):
        borrow(generator, train, Layout(dp=4), rank, config, torch.float64)
        assert_same(generator.generate(PROMPTS, PARAMS, seed=0), want, tolerance=1e-12)


def gaps(world, layout: Layout, family: str) -> None:
    config = CONFIGS[family]
    generator = make_generator(world, layout, config=config, owns_weights=False)
    want = generator.generate(PROMPTS, PARAMS, seed=0)
    for train in ("tp4", "tp2pp2-vpp2", "pp2dp2-v", "dp4"):
        borrow(generator, train, layout, world.rank, config, torch.float64)
        assert_same(generator.generate(PROMPTS, PARAMS, seed=0), want, tolerance=1e-12)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("layout", [Layout(tp=2, dp=2), Layout(tp=4)], ids=["tp2dp2", "tp4"])
def test_a_part_of_the_model_on_each_rank(layout, family):
    run_ranks(4, gaps, layout, family)


def test_equal_layouts_give_equal_bits_in_training_memory():
    config = CONFIGS["biases-norms-tied"]
    want = make_generator(config=config, dtype=torch.float32, owns_weights=False).generate(PROMPTS, PARAMS, seed=0)
    generator = make_generator(config=config, dtype=torch.float32, owns_weights=False)
    held = decoder_shard_map(config, Grid.of(Layout()), Head.LANGUAGE_MODEL)
    storages = memory(held, held, 0, config, torch.float32)
    lend(generator.stage, tiling(held, held, 0), storages)
    assert generator.generate(PROMPTS, PARAMS, seed=0) == want
    assert {f"{TRAINING}{name}": parameter.data_ptr() for name, parameter in generator.stage.named_parameters()} == {
        name: tensor.data_ptr() for name, tensor in storages.items()}


def test_what_is_written_later_holds_at_once_and_what_is_taken_back_is_not_kept():
    held = decoder_shard_map(CONFIG, Grid.of(Layout(tp=2, dp=2)), Head.LANGUAGE_MODEL)
    wanted = decoder_shard_map(CONFIG, Grid.of(Layout(dp=4)), Head.LANGUAGE_MODEL)
    storages = memory(held, wanted, 0, CONFIG, torch.float64)
    stage = make_generator(config=CONFIG, owns_weights=False).stage
    lend(stage, tiling(held, wanted, 0), storages)
    x = torch.ones(2, CONFIG.hidden_size, dtype=torch.float64)
    assert stage.logits(x).any()
    for tensor in storages.values():
        tensor.zero_()
    assert not stage.logits(x).any()
    take_back(stage)
    assert all(parameter.numel() == 0 for parameter in stage.parameters())
    assert all(module.tiles is None for module in stage.modules() if isinstance(module, TILED))
