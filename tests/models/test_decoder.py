"""One stage on one rank: its storages are those of the shard map, fresh weights, outputs at targets, empty batches."""

from dataclasses import replace

import pytest
import torch

from hybridflow.micro_batch import MicroBatch, Sample
from hybridflow.models.attention import PackedCausal
from hybridflow.models.config import Family, Head, ModelConfig
from hybridflow.models.decoder import DecoderStage, HeadOutput
from hybridflow.models.init import init_weights
from hybridflow.models.layout import chunk_layers
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel.box import Box
from hybridflow.parallel.mesh import Coord, Grid, Layout, Mesh
from hybridflow.parallel.schedules.chunks import ChunkOrder, Chunks
from hybridflow.parallel.world import World

CPU = torch.device("cpu")
CONFIG = ModelConfig(Family.LLAMA, 67, 32, 48, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=12, qkv_bias=True,
                     o_bias=True, mlp_bias=True, qk_norm=True)
SAMPLES = [Sample((5, 9, 3), (7, 2)), Sample((4,), (6, 8, 1)), Sample((10, 11), (12,))]


def whole_stage(config=CONFIG, head=Head.LANGUAGE_MODEL, dtype=torch.float32, seed=3):
    mesh = Mesh(Grid.of(Layout()), World.single(CPU))
    stage = DecoderStage(config, mesh, head, chunks=Chunks(), chunk_layers=(range(config.num_layers),),
                         sequence_parallel=False, dtype=dtype)
    init_weights(stage.state_dict(), decoder_shard_map(config, mesh.grid, head), 0, seed, config)
    return stage


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", Head)
def test_storages_are_filled_exactly_once(head, tied):
    """On one rank each element of each parameter belongs to exactly one box."""
    config = replace(CONFIG, tie_word_embeddings=tied)
    stage = whole_stage(config, head)
    counts = {name: torch.zeros_like(storage) for name, storage in stage.state_dict().items()}
    shard_map = decoder_shard_map(config, Grid.of(Layout()), head)
    for shard in shard_map.shards(0):
        shard.view(counts).add_(1)
    assert all(bool((count == 1).all()) for count in counts.values())
    assert {shard.box for shard in shard_map.shards(0)} == {Box.whole(*item) for item in shard_map.shapes.items()}


def full_tensors(layout, layers_per_chunk=None, chunks=None):
    """Canonical tensors put together from the freshly drawn storages of every rank of a layout."""
    grid = Grid.of(layout)
    shard_map = decoder_shard_map(CONFIG, grid, Head.LANGUAGE_MODEL, chunks, layers_per_chunk)
    full = {name: torch.full(shape, torch.nan) for name, shape in shard_map.shapes.items()}
    for rank in grid.ranks:
        shards = shard_map.shards(rank)
        sizes = {}
        for shard in shards:
            sizes[shard.storage] = max(sizes.get(shard.storage, 0), shard.offset + shard.box.numel)
        storages = {name: torch.full((size,), torch.nan) for name, size in sizes.items()}
        init_weights(storages, shard_map, rank, 3, CONFIG)
        for shard in shards:
            known = full[shard.box.name][shard.box.slices]
            fresh = shard.view(storages)
            assert bool((known.isnan() | (known == fresh)).all())  # replicas agree
            known.copy_(fresh)
    return full


def test_fresh_weights_do_not_depend_on_the_layout():
    one = full_tensors(Layout())
    assert not any(bool(tensor.isnan().any()) for tensor in one.values())
    for layout, counts, chunks in [(Layout(4, 2), None, None), (Layout(2, 2, 2), (1, 3), None),
                                   (Layout(1, 4), None, None), (Layout(2, 2), None, Chunks(2, 2)),
                                   (Layout(1, 2), None, Chunks(2, 2, ChunkOrder.V))]:
        for name, tensor in full_tensors(layout, counts, chunks).items():
            assert torch.equal(tensor, one[name]), name


def test_blocks_of_rows(monkeypatch):
    """A small block size cuts tensors across blocks, and rows still do not depend on who draws them."""
    monkeypatch.setattr("hybridflow.models.init.BLOCK_NUMEL", 5 * 32)
    one, cut = full_tensors(Layout()), full_tensors(Layout(4, 2))
    assert all(torch.equal(one[name], cut[name]) for name in one)


def test_initial_distributions():
    state = whole_stage(replace(CONFIG, hidden_size=256, vocab_size=500)).state_dict()
    assert state["embed.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert state["layers.1.mlp.down.weight"].std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert (state["layers.0.input_norm.weight"] == 1).all() and (state["layers.0.attention.qkv.bias"] == 0).all()
    assert not torch.equal(state["layers.0.mlp.down.weight"], state["layers.1.mlp.down.weight"])
    assert not torch.equal(state["embed.weight"], whole_stage(replace(CONFIG, hidden_size=256, vocab_size=500),
                                                              seed=4).state_dict()["embed.weight"])


def test_outputs_at_targets():
    """Log-probs and entropies are those of the full logits; packed rows equal each row alone."""
    stage = whole_stage(dtype=torch.float64)
    batch = MicroBatch.pack(SAMPLES, device=CPU)
    out = stage(batch.input_ids, batch, temperature=0.5, with_entropy=True)
    assert isinstance(out, HeadOutput) and out.log_probs.shape == out.entropy.shape == (6,)
    hidden = stage.forward_hidden(batch.input_ids, batch.position_ids, PackedCausal(batch.lengths, CPU))
    log_probs = (stage.logits(hidden)[batch.target_index] / 0.5).log_softmax(-1)
    torch.testing.assert_close(out.log_probs, log_probs.gather(1, batch.targets[:, None])[:, 0])
    torch.testing.assert_close(out.entropy, -(log_probs.exp() * log_probs).sum(-1))
    alone = [stage(one.input_ids, one, temperature=0.5).log_probs
             for one in (MicroBatch.pack([sample], device=CPU) for sample in SAMPLES)]
    torch.testing.assert_close(out.log_probs, torch.cat(alone))
    assert stage(batch.input_ids, batch).entropy is None


@pytest.mark.parametrize("head", [Head.VALUE, Head.SCORE])
def test_values_are_wide(head):
    stage = whole_stage(head=head, dtype=torch.bfloat16)
    batch = MicroBatch.pack(SAMPLES, device=CPU)
    out = stage(batch.input_ids, batch)
    assert out.shape == (6,) and out.dtype is torch.float32 and bool(out.isfinite().all())


@pytest.mark.parametrize("head", [Head.LANGUAGE_MODEL, Head.VALUE])
def test_no_rows(head):
    """A replica without rows still has a loss of 0 with a live graph, and gradients that are all 0."""
    stage = whole_stage(head=head)
    batch = MicroBatch.pack([], device=CPU)
    out = stage(batch.input_ids, batch)
    answers = out.log_probs if head is Head.LANGUAGE_MODEL else out
    answers.sum().backward()
    assert answers.shape == (0,)
    assert all(p.grad is not None and bool((p.grad == 0).all()) for p in stage.parameters())


def test_stage_refuses_what_cannot_be_cut():
    with pytest.raises(ValueError, match="num_kv_heads 3 must divide num_heads 4"):
        whole_stage(replace(CONFIG, num_kv_heads=3))


def test_stages_hold_their_layers():
    """Rank 6 of tp2 pp4 is tensor rank 0 of the last stage: one layer, the norm and the head."""
    grid = Grid.of(Layout(2, 4))
    assert grid.coord(6) == Coord(tp=0, pp=3) and chunk_layers(4, Chunks(4))[3] == range(3, 4)
    storages = {shard.storage for shard in decoder_shard_map(CONFIG, grid, Head.LANGUAGE_MODEL).shards(6)}
    assert {name.split(".")[0] for name in storages} == {"layers", "norm", "head"}
    assert {name.split(".")[1] for name in storages if name.startswith("layers")} == {"3"}
