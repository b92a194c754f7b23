"""Recomputed layers: the same bits of every gradient, the same collectives on all ranks, no product twice, no leak."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridflow.bench.live_bytes import LiveBytes
from hybridflow.kernels import native_backward, products
from hybridflow.kernels.native_build import Unavailable
from hybridflow.micro_batch import MicroBatch, Sample
from hybridflow.models.config import Family, Head, ModelConfig
from hybridflow.models.decoder import DecoderStage
from hybridflow.models.init import init_weights
from hybridflow.models.layout import chunk_layers
from hybridflow.models.recompute import Recompute, keep_less
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.weight_grads import WeightGrads, attach
from hybridflow.parallel.world import World
from tests.models.operations import Operations
from tests.ranks import run_ranks

CONFIG = ModelConfig(Family.LLAMA, 67, 32, 48, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=12)
RICH = replace(CONFIG, qk_norm=True, qkv_bias=True, o_bias=True, mlp_bias=True, tie_word_embeddings=True)
ROWS = {
    "ragged": [Sample((5, 9, 3), (7, 2)), Sample((4,), (6, 8, 1)), Sample((10, 11), (12,))],
    "skewed": [Sample((7, 3) * (length // 2), (8, 5)) for length in (2, 700, 40, 4, 600)],  # two rectangles
    "equal": [Sample((3, 4, 1), (5, 9)), Sample((4,), (6, 8, 1, 1))],
    "long": [Sample(tuple(range(60)), (1, 2, 3))],
    "one": [Sample((3,), (4,)), Sample((5,), ())],
    "nothing": [],
}
ONE_RANK = Layout()
AGAIN = (Recompute.SELECTIVE, Recompute.FULL)


def build(world=None, layout=ONE_RANK, config=CONFIG, dtype=torch.float32, sequence_parallel=False,
          head=Head.LANGUAGE_MODEL, recompute=Recompute.NONE, layers=None):
    mesh = Mesh(Grid.of(layout), world or World.single(torch.device("cpu")))
    chunks = Chunks()
    stage = DecoderStage(config, mesh, head, chunks=chunks, chunk_layers=chunk_layers(config.num_layers, chunks),
                         sequence_parallel=sequence_parallel, dtype=dtype, recompute=recompute, recompute_layers=layers)
    init_weights(stage.state_dict(), decoder_shard_map(config, mesh.grid, head), mesh.world.rank, 3, config)
    return stage


def answers(stage, batch) -> Tensor:
    out = stage(batch.input_ids, batch, with_entropy=True)
    return out.log_probs.sum() + 0.1 * out.entropy.sum()


def gradients(stage, batch) -> dict[str, Tensor]:
    stage.zero_grad()
    answers(stage, batch).backward()
    return {name: parameter.grad.clone() for name, parameter in stage.named_parameters()}


def pack(name, stage):
    return MicroBatch.pack(ROWS[name], device=torch.device("cpu"),
                           multiple_of=stage.tp.size if stage.sequence_parallel else 1)


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [CONFIG, RICH], ids=["plain", "rich"])
def test_gradients_are_the_same_bits(config, dtype):
    stages = [build(config=config, dtype=dtype, recompute=recompute, layers=layers)
              for recompute, layers in ((Recompute.NONE, None), *((r, layers) for r in AGAIN for layers in (None, 1)))]
    for name in ROWS:
        first, *rest = [gradients(stage, pack(name, stage)) for stage in stages]
        for other in rest:
            assert_equal(first, other)


def ranks_gradients(world, layout, config, sequence_parallel):
    """Whether every setting gives the same bits on this rank."""
    found = []
    for recompute in Recompute:
        stage = build(world, layout, config, sequence_parallel=sequence_parallel, recompute=recompute)
        found.append([gradients(stage, pack(name, stage)) for name in ("ragged", "equal", "one")])
    first, *rest = found
    return all(torch.equal(a[name], b[name]) for other in rest for a, b in zip(first, other, strict=True) for name in a)


@pytest.mark.parametrize(("layout", "sequence_parallel"), [(Layout(2), False), (Layout(2), True), (Layout(4), False),
                                                           (Layout(4), True)], ids=str)
def test_collectives_inside(layout, sequence_parallel):
    """Sums over tensor ranks, gathers of tokens, and replicated key-value heads (tp 4) run again in backward."""
    for config in (CONFIG, RICH):
        assert all(run_ranks(layout.size, ranks_gradients, layout, config, sequence_parallel))


@pytest.mark.parametrize("recompute", AGAIN)
def test_weight_gradients_of_their_own(recompute):
    """Linears that leave their weight gradients to `WeightGrads`, at once or in a later W, see the remade inputs."""
    expected = gradients(build(), pack("ragged", build()))
    stage = build(recompute=recompute)
    weight_grads, names = WeightGrads(), {parameter: name for name, parameter in stage.named_parameters()}
    main = {names[weight]: torch.zeros_like(weight) for weight in attach(stage, weight_grads)}
    for weight in attach(stage, weight_grads):
        weight_grads.register(weight, lambda name=names[weight]: main[name], lambda: None)
    answers(stage, pack("ragged", stage)).backward()
    with weight_grads.keeping() as kept:
        answers(stage, pack("ragged", stage)).backward()
    weight_grads.run(kept)
    for name, parameter in stage.named_parameters():
        grad = main[name] if name in main else parameter.grad
        torch.testing.assert_close(grad, 2 * expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("rows", "calls_a_layer"), [("ragged", 1), ("skewed", 2)])
@pytest.mark.parametrize("with_weight_grads", [False, True])
def test_selective_repeats_no_product(with_weight_grads, rows, calls_a_layer, monkeypatch):
    """Neither matrix products nor attention run twice; a full recomputation runs all but nothing behind `down`."""
    monkeypatch.setattr(native_backward, "native_library", lambda: Unavailable("torch's calls are counted here"))
    monkeypatch.setattr(products, "native_gains", lambda: False)
    counts = {}
    for recompute in Recompute:
        stage = build(recompute=recompute)
        if with_weight_grads:
            weight_grads = WeightGrads()
            for weight in attach(stage, weight_grads):
                weight_grads.register(weight, lambda size=weight.shape: torch.zeros(size), lambda: None)
        total = answers(stage, pack(rows, stage))
        with Operations() as calls:
            total.backward()
        counts[recompute] = [calls.count[name] + calls.count[other] for name, other in (
            ("mm", "addmm"), ("_scaled_dot_product_flash_attention_for_cpu", ""), ("silu", ""))]
    none, selective, full = counts.values()
    assert selective[:2] == none[:2] and selective[2] == none[2] + 4
    repeated = 4 if with_weight_grads else 3  # torch's own product is not run to learn that its input is there
    assert full == [none[0] + 4 * repeated, none[1] + 4 * calls_a_layer, none[2] + 4]


def test_nothing_is_wrapped_without_a_gradient(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("a forward alone pays nothing")

    monkeypatch.setattr("hybridflow.models.decoder.keep_less", never)
    monkeypatch.setattr("hybridflow.models.decoder.checkpoint", never)
    for recompute in AGAIN:
        stage = build(recompute=recompute)
        with torch.no_grad():
            answers(stage, pack("ragged", stage))
        with pytest.raises(AssertionError, match="pays nothing"):
            answers(stage, pack("ragged", stage))


def test_first_layers_of_each_chunk():
    mesh = Mesh(Grid.of(Layout()), World.single(torch.device("cpu")))
    stage = DecoderStage(CONFIG, mesh, Head.VALUE, chunks=Chunks(1, 2), chunk_layers=(range(0, 1), range(1, 4)),
                         sequence_parallel=False, dtype=torch.float32, recompute=Recompute.FULL, recompute_layers=2)
    assert [layer for layer, module in stage.layers.items() if module.recompute is Recompute.FULL] == ["0", "1", "2"]


@pytest.mark.parametrize("recompute", AGAIN)
def test_everything_is_freed(recompute):
    """With the garbage collector off: graphs that hold themselves would fill a device."""
    stage = build(recompute=recompute, config=RICH)
    batch = pack("ragged", stage)
    gradients(stage, batch)  # gradients are there and are added to
    gc.collect()
    gc.disable()
    try:
        for differentiate in (True, False):
            with LiveBytes() as live:
                total = answers(stage, batch)
                assert live.now > 0
                if differentiate:
                    total.backward()
                del total
            assert live.now == 0
    finally:
        gc.enable()


def test_keep_less_by_hand():
    """Of y = exp(2x) * 3x autograd keeps exp(2x), which exp put out; the factors of the product are made again."""
    runs = []

    def fn(x):
        runs.append(1)
        return (2 * x).exp() * (3 * x)

    x = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    y = keep_less(fn, x)
    y.backward(torch.ones(2, dtype=torch.float64), retain_graph=True)
    expected = (2 * 3 * x + 3) * (2 * x).exp()
    torch.testing.assert_close(x.grad, expected.detach())
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * expected.detach())
    assert len(runs) == 3  # once in each backward more


def test_a_changed_input_is_refused():
    x = torch.ones(3, requires_grad=True) * 1
    y = keep_less(lambda x: (x * x).sin() * x, x)
    x.detach().add_(1)
    with pytest.raises(AssertionError, match="changed in place"):
        y.sum().backward()
