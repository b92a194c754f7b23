import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from hybridflow.generation.native_runner import NativeRunner
from hybridflow.generation.runner import Chunk, StepBatch
from hybridflow.kernels.native_build import Unavailable, native_library
from hybridflow.kernels.native_ops import set_threads
from hybridflow.models.attention import PackedCausal
from hybridflow.models.config import Head
from hybridflow.models.decoder import DecoderStage
from hybridflow.models.layout import chunk_layers, sum_segments
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.world import World
from tests.generation.small_model import CONFIG, CONFIGS, set_weights
from tests.ranks import run_ranks

AVAILABLE = native_library()
pytestmark = pytest.mark.skipif(isinstance(AVAILABLE, Unavailable), reason=str(AVAILABLE))
MORE = CONFIGS | {
    "biases": replace(CONFIG, o_bias=True, mlp_bias=True, qkv_bias=True, qk_norm=True, num_layers=3),
    "odd": replace(CONFIG, hidden_size=60, intermediate_size=56, num_heads=6, num_kv_heads=1, head_dim=10,
                   vocab_size=41),
    "wide": replace(CONFIG, num_heads=8, num_kv_heads=8, head_dim=64, intermediate_size=100),
}
LENGTHS = (37, 1, 16, 20)
WIDTH = 4  # blocks of a sequence
WHOLE = Layout()


def make_stage(name, world=None, layout=WHOLE, dtype=torch.float64):
    config, world = MORE[name], world or World.single(torch.device("cpu"))
    mesh, chunks = Mesh(Grid.of(layout), world), Chunks(layout.pp)
    stage = DecoderStage(config, mesh, Head.LANGUAGE_MODEL, chunks=chunks, sequence_parallel=False, dtype=dtype,
                         chunk_layers=chunk_layers(config.num_layers, chunks))
    set_weights(stage, mesh.grid, world.rank, config, 0)
    with torch.no_grad():  # norms and biases start as 1 and 0, which would hide them; equal on all ranks
        for key, parameter in sorted(stage.named_parameters()):
            if parameter.ndim == 1 and "qkv" not in key and "gate_up" not in key:
                parameter.add_(torch.sin(torch.arange(len(parameter), dtype=torch.float64) + len(key)) / 4)
    return stage, mesh


def make_runner(*args, segments=1, **more):
    stage, mesh = make_stage(*args, **more)
    runner = NativeRunner(stage, segments)
    runner.prepare()
    runner.allocate(len(LENGTHS) * WIDTH)
    return runner, mesh


def token_rows(name):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(MORE[name].vocab_size, (length,), generator=generator) for length in LENGTHS]


def reference(name, dtype=torch.float64):
    """Logits of all tokens, row after row, by the trainer's forward."""
    stage, _ = make_stage(name, dtype=dtype)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with torch.no_grad():
        hidden = stage.forward_hidden(torch.cat(token_rows(name)), positions,
                                      PackedCausal(LENGTHS, torch.device("cpu")))
        return stage.logits(hidden)


def step_of(rows, done, parts, tables):
    """A step of (row, count) parts, of which each goes on where its row is; those of one token are decoded."""
    parts = sorted(parts, key=lambda part: part[1] != 1)
    chunks, ids, positions, slots = [], [], [], []
    for row, count in parts:
        if count > 1:
            chunks.append(Chunk(len(slots), count, row, done[row]))
        ids += rows[row][done[row]:done[row] + count].tolist()
        positions += range(done[row], done[row] + count)
        slots += [row] * count
    batch = StepBatch(sum(count == 1 for _, count in parts), tuple(chunks), torch.tensor(ids),
                      torch.tensor(positions, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32), tables,
                      torch.arange(len(slots)))
    return batch, list(zip(slots, positions, strict=True))


def plan(style):
    """Steps that take all tokens of `LENGTHS`."""
    if style == "alone":
        return [[(row, 1)] for row, length in enumerate(LENGTHS) for _ in range(length)]
    if style == "prefill":
        return [[(row, length) for row, length in enumerate(LENGTHS)]]
    if style == "decode":
        return [[(row, 1) for row, length in enumerate(LENGTHS) if length > i] for i in range(max(LENGTHS))]
    draw, left, steps = random.Random(style), list(LENGTHS), []
    while any(left):
        parts = [(row, draw.randint(1, min(n, 9))) for row, n in enumerate(left) if n and draw.random() < 0.7]
        for row, count in parts:
            left[row] -= count
        steps += [parts] if parts else []
    return steps


def run(runner, mesh, name, style, threads=1, block_seed=0, dtype=torch.float64):
    """Logits of all tokens in the order of `reference`; None before the last stage. `dtype`: of what stages send."""
    rows, done, found = token_rows(name), [0] * len(LENGTHS), {}
    blocks = torch.randperm(len(LENGTHS) * WIDTH, generator=torch.Generator().manual_seed(block_seed))
    tables = blocks.view(-1, WIDTH).to(torch.int32)
    set_threads(threads)
    stage_index, stages = mesh.pp.index, mesh.pp.size
    for parts in plan(style):
        batch, places = step_of(rows, done, parts, tables)
        x = None
        if stage_index > 0:
            x = torch.empty(len(places), MORE[name].hidden_size, dtype=dtype)
            dist.recv(x, mesh.pp.ranks[stage_index - 1])
        out = runner.run(batch, x)
        if stage_index < stages - 1:
            dist.send(out.contiguous(), mesh.pp.ranks[stage_index + 1])
        else:
            found |= dict(zip(places, runner.logits(out).clone(), strict=True))
        for row, count in parts:
            done[row] += count
    set_threads(1)
    return torch.stack([found[key] for key in sorted(found)]) if found else None


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", list(MORE))
def test_logits_are_the_trainers(name):
    runner, mesh = make_runner(name)
    expected = reference(name)
    for style in ("prefill", "decode", 5, 6):
        close(run(runner, mesh, name, style), expected)


@pytest.mark.parametrize("name", list(MORE))
def test_other_dtypes_round_as_much_as_the_trainer(name):
    exact = reference(name)
    for dtype, least in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        runner, mesh = make_runner(name, dtype=dtype)
        ours, trainers = run(runner, mesh, name, 5), reference(name, dtype)
        assert ours.dtype == torch.float32
        scale = exact.abs().mean()
        assert (ours - trainers).abs().mean() < least * scale
        assert (ours - exact).abs().mean() < 1.3 * (trainers - exact).abs().mean() + 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["qwen2", "odd"])
def test_the_bits_of_a_token_depend_on_its_own_past_alone(name, dtype):
    runner, mesh = make_runner(name, dtype=dtype)
    expected = run(runner, mesh, name, "prefill")
    for style, threads in (("alone", 1), ("decode", 1), ("decode", 3), ("prefill", 2), (7, 2), (8, 3)):
        assert torch.equal(run(runner, mesh, name, style, threads, block_seed=threads), expected), (style, threads)


def test_copied_blocks_hold_the_same_tokens():
    runner, mesh = make_runner("llama")
    ids, tables = token_rows("llama")[0], torch.tensor([[3, 7, 5, 1], [3, 7, 11, 2]], dtype=torch.int32)

    def run_step(parts, done):
        return runner.logits(runner.run(step_of([ids, ids], done, parts, tables)[0], None)).clone()

    run_step([(0, 36)], [0, 0])
    runner.copy_blocks([(5, 11)])
    first, second = run_step([(0, 1), (1, 1)], [36, 36])
    assert torch.equal(first, second)
    close(first, reference("llama")[36])


def test_weights_exist_once_and_new_ones_are_taken():
    stage, mesh = make_stage("qwen2")
    weights = {name: value.clone() for name, value in stage.state_dict().items()}
    runner = NativeRunner(stage)
    for scale in (1.0, 0.5):
        for name, parameter in stage.named_parameters():
            parameter.data = scale * weights[name]
        runner.prepare()
        runner.allocate(len(LENGTHS) * WIDTH)
        left = {name for name, parameter in stage.named_parameters() if parameter.ndim == 2 or parameter.numel() == 0}
        assert {name for name in left if stage.get_parameter(name).numel()} == {"embed.weight"}
        logits = run(runner, mesh, "qwen2", "prefill")
        runner.release()
        if scale == 1.0:
            close(logits, reference("qwen2"))
        else:
            assert (logits - reference("qwen2")).abs().max() > 0.1


def test_segments_must_divide_what_is_added_up():
    stage, _ = make_stage("llama")
    with pytest.raises(ValueError, match="5 segments"):
        NativeRunner(stage, 5)


def rank_logits(world, name, layout, dtype, segments, style):
    if world.rank >= layout.size:
        return None
    runner, mesh = make_runner(name, world=world, layout=layout, dtype=dtype, segments=segments)
    return run(runner, mesh, name, style, dtype=dtype)


LAYOUTS = [Layout(tp=4), Layout(tp=2, pp=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_ranks_compute_what_one_does(layout, name):
    expected = reference(name)
    found = [out for out in run_ranks(4, rank_logits, name, layout, torch.float64, 1, 9) if out is not None]
    assert len(found) == layout.tp
    for out in found:
        close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_segments_make_the_bits_independent_of_tp(dtype):
    name, config = "qwen2", CONFIGS["qwen2"]
    runner, mesh = make_runner(name, dtype=dtype, segments=sum_segments(config))
    expected = run(runner, mesh, name, "prefill")
    for layout in LAYOUTS:
        outs = run_ranks(4, rank_logits, name, layout, dtype, sum_segments(config, layout.tp), 9)
        for out in outs:
            assert out is None or torch.equal(out, expected)
