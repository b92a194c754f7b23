"""Formulas of kept activations against the storages that really stay alive, byte for byte; peaks over schedules."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from hybridflow.bench.live_bytes import LiveBytes
from hybridflow.micro_batch import MicroBatch, Sample
from hybridflow.models.activation_memory import ActivationMemory, PackedShape, stage_peaks
from hybridflow.models.attention import PackedCausal
from hybridflow.models.config import Family, Head, ModelConfig
from hybridflow.models.decoder import DecoderStage
from hybridflow.models.init import init_weights
from hybridflow.models.layout import chunk_layers
from hybridflow.models.recompute import Recompute
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel import vocab
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.schedules.chunks import ChunkOrder, Chunks
from hybridflow.parallel.weight_grads import WeightGrads, attach
from hybridflow.parallel.world import World
from tests.ranks import run_ranks

CONFIG = ModelConfig(Family.LLAMA, 67, 32, 48, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=12)
RICH = replace(CONFIG, qk_norm=True, qkv_bias=True, o_bias=True, mlp_bias=True, tie_word_embeddings=True)
EQUAL = [Sample((3, 4, 1), (5, 9)), Sample((4,), (6, 8, 1, 1))]
RAGGED = [Sample((5, 9, 3), (7, 2)), Sample((4,), (6, 8, 1)), Sample((10, 11), (12,))]
SKEWED = [Sample((7,) * length, (8,)) for length in (2, 900, 40, 3, 1000, 260)]  # three rectangles
LONG = [Sample(tuple(range(60)), (1, 2, 3))]
ONE = [Sample((3,), ())]
RECOMPUTES = [(Recompute.NONE, None), (Recompute.SELECTIVE, None), (Recompute.FULL, None), (Recompute.FULL, 1),
              (Recompute.SELECTIVE, 0)]


def measured(world, layout, chunks, config, head, dtype, sequence_parallel, samples, recompute, layers):
    """By chunk of this rank: bytes that stay alive for its backward, beside those of the formula."""
    mesh = Mesh(Grid.of(layout), world)
    cut = chunk_layers(config.num_layers, chunks)
    stage = DecoderStage(config, mesh, head, chunks=chunks, chunk_layers=cut, sequence_parallel=sequence_parallel,
                         dtype=dtype, recompute=recompute, recompute_layers=layers)
    init_weights(stage.state_dict(), decoder_shard_map(config, mesh.grid, head, chunks), world.rank, 3, config)
    batch = MicroBatch.pack(samples, device=world.device, multiple_of=layout.tp if sequence_parallel else 1)
    memory = ActivationMemory(config, head, dtype, layout.tp, 1, sequence_parallel, recompute, layers,
                              fused=stage.fuses_attention)
    tokens = batch.input_ids.shape[0] // (layout.tp if sequence_parallel else 1)
    x = torch.rand(tokens, config.hidden_size, dtype=dtype)
    found = {}
    for chunk in chunks.of_stage(mesh.coord.pp):

        def forward(chunk=chunk):
            out = stage(batch.input_ids if chunk == 0 else x.clone().requires_grad_(), batch, chunk)
            if chunk < chunks.last:
                return get_gradient_edge(out)
            return get_gradient_edge(out.log_probs if head is Head.LANGUAGE_MODEL else out)

        # gloo's threads let go of a collective's tensors some time after its end, so that one count may be too high.
        kept = min(measure_saved_bytes(forward) for _ in range(1 if world.size == 1 else 3))
        found[chunk] = kept, memory.chunk(
            PackedShape.of(batch), len(cut[chunk]), is_first=chunk == 0, is_last=chunk == chunks.last)
    return found


def measure_saved_bytes(fn):
    """Bytes that were made while `fn` ran and live on with what it returns: a graph and no tensor. A CPU keeps no
    logits meanwhile.
    """
    before, vocab.KEPT_LOGITS = vocab.KEPT_LOGITS, -1
    with LiveBytes() as live:
        held = fn()
    vocab.KEPT_LOGITS = before
    kept = live.now
    del held
    return kept


def assert_exact(found):
    assert all(kept == expected for kept, expected in found.values()), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [CONFIG, RICH], ids=["plain", "rich"])
@pytest.mark.parametrize(("recompute", "layers"), RECOMPUTES)
def test_one_rank(config, dtype, recompute, layers):
    world = World.single(torch.device("cpu"))
    for samples in (EQUAL, RAGGED, SKEWED, LONG, ONE, []):
        for head in (Head.LANGUAGE_MODEL, Head.VALUE):
            assert_exact(measured(world, Layout(), Chunks(1, 2), config, head, dtype, False, samples, recompute,
                                  layers))


@pytest.mark.parametrize(("layout", "sequence_parallel"), [(Layout(2), False), (Layout(2), True), (Layout(4), True),
                                                           (Layout(2, 2), True)], ids=str)
def test_tensor_parallel(layout, sequence_parallel):
    chunks = Chunks(layout.pp, 2, ChunkOrder.V if layout.pp > 1 else ChunkOrder.LOOP)
    for config, dtype, samples in ((CONFIG, torch.float32, RAGGED), (RICH, torch.bfloat16, EQUAL)):
        for recompute in Recompute:
            for found in run_ranks(layout.size, measured, layout, chunks, config, Head.LANGUAGE_MODEL, dtype,
                                   sequence_parallel, samples, recompute, None):
                assert_exact(found)


def test_less_is_kept():
    """For a Llama 3 8B layer, of 8192 tokens in two rows: in units of its hidden states (64 MiB)."""
    config = ModelConfig(Family.LLAMA, 128256, 4096, 14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)
    memory, shape = ActivationMemory(config, Head.LANGUAGE_MODEL, torch.bfloat16), PackedShape((4096,) * 2, 8192, 4096)
    hidden = 8192 * 4096 * 2
    none, selective, full = (memory.layer(shape, recompute) / hidden for recompute in Recompute)
    # 2 inputs of norms, their 2 outputs, q k v 1.5, rotated 1.25, seen 1, gate and up 7, their product 3.5.
    assert (none, selective, full) == pytest.approx((18.25, 11.5, 1.0), abs=0.03)


@pytest.mark.parametrize("recompute", Recompute)
def test_weight_inputs(recompute):
    """What the W of a split backward waits with."""
    mesh = Mesh(Grid.of(Layout()), World.single(torch.device("cpu")))
    stage = DecoderStage(CONFIG, mesh, Head.LANGUAGE_MODEL, chunks=Chunks(1, 2), sequence_parallel=False,
                         chunk_layers=chunk_layers(4, Chunks(1, 2)), dtype=torch.float32, recompute=recompute)
    init_weights(stage.state_dict(), decoder_shard_map(CONFIG, mesh.grid, Head.LANGUAGE_MODEL), 0, 3, CONFIG)
    weight_grads = WeightGrads()
    for weight in attach(stage, weight_grads):
        weight_grads.register(weight, torch.zeros_like(weight).clone, lambda: None)
    batch = MicroBatch.pack(RAGGED, device=mesh.device)
    given = torch.rand(batch.num_tokens, 32)

    def backward():
        x = torch.rand(batch.num_tokens, 32).requires_grad_()
        attend = PackedCausal(batch.lengths, mesh.device)
        root = get_gradient_edge(stage.forward_hidden(x, batch.position_ids, attend, 1))
        with weight_grads.keeping() as kept:
            torch.autograd.backward(root, given.clone())
        return [(work.grad, work.x.detach()) for work in kept]  # without the graph that x came from

    for parameter in stage.parameters():  # gradients that autograd itself accumulates are there before
        parameter.grad = torch.zeros_like(parameter)
    memory = ActivationMemory(CONFIG, Head.LANGUAGE_MODEL, torch.float32, recompute=recompute)
    assert measure_saved_bytes(backward) == memory.weight_inputs(PackedShape.of(batch), 2)


def test_peaks():
    """By hand: 1F1B holds pp - s micro-batches; a split backward holds inputs of weight gradients until W."""
    schedule = ScheduleKind.ONE_F_ONE_B.compute(Chunks(4), 8)
    assert stage_peaks(schedule, lambda i, c: 1) == (4, 3, 2, 1)
    assert stage_peaks(schedule, lambda i, c: 10 * (i == 3)) == (10, 10, 10, 10)
    gpipe = ScheduleKind.GPIPE.compute(Chunks(2), 3)
    assert stage_peaks(gpipe, lambda i, c: (100, 1)[c]) == (300, 3)
    memory, shapes = ActivationMemory(CONFIG, Head.LANGUAGE_MODEL, torch.float32), [PackedShape((5, 3), 8, 4)] * 3
    first, last = (memory.chunk(shapes[0], 2, is_first=i == 0, is_last=i == 1) for i in range(2))
    assert memory.peaks(gpipe, shapes, (range(2), range(2, 4))) == (3 * first, 3 * last)
    split = ScheduleKind.ZB_H1.compute(Chunks(2), 4)
    assert stage_peaks(split, lambda i, c: 1, lambda i, c: 1) == (2, 2)
