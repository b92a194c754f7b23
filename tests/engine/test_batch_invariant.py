"""The batch-invariant mode: a token's log-prob has the bits that generation gives it, on every layout; gradients are
those of the ordinary mode to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.losses import supervised_loss
from hybridflow.algorithms.reduction import LossReduction
from hybridflow.engine.native import ForwardEngine, Output, TrainEngine
from hybridflow.engine.options import EngineOptions, TrainOptions
from hybridflow.generation.native_runner import NativeRunner
from hybridflow.generation.runner import Chunk, StepBatch
from hybridflow.hybrid_engine import generation_stage
from hybridflow.kernels import native_rows
from hybridflow.kernels.native_build import Unavailable, native_library
from hybridflow.micro_batch import MicroBatch, Sample, TokenColumns
from hybridflow.models.config import Head
from hybridflow.models.layout import sum_segments
from hybridflow.models.recompute import Recompute
from hybridflow.packing import MicroBatching
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.optimizer import LrSchedule
from hybridflow.parallel.optimizer_state import AdamWSettings
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.world import World
from hybridflow.target_rows import TargetRows
from hybridflow.trainer.roles import Reduction, TrainedRole
from tests.engine.models import assemble, canonical_grads, ragged_batch, ragged_samples, tiny_model
from tests.ranks import run_ranks

AVAILABLE = native_library()
pytestmark = pytest.mark.skipif(isinstance(AVAILABLE, Unavailable), reason=str(AVAILABLE))

ROWS, TEMPERATURE = 9, 0.7
PLAIN = tiny_model(hidden_size=24, intermediate_size=40, num_heads=8, num_kv_heads=2, head_dim=6)
MODELS = {
    "plain": PLAIN,
    "rich": replace(PLAIN, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, tie_word_embeddings=True),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Case:
    layout: Layout = Layout()
    scored_at_once: int = 3
    trained_at_once: int = 2
    sequence_parallel: bool = False
    recompute: Recompute = Recompute.NONE
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    vpp: int = 1


CASES = [
    Case(Layout(tp=4), 1),
    Case(Layout(tp=2, dp=2), ROWS, sequence_parallel=True, recompute=Recompute.SELECTIVE),
    Case(Layout(tp=2, pp=2), 2, ROWS, sequence_parallel=True, recompute=Recompute.FULL),
    Case(Layout(pp=2, dp=2), 4, 1, schedule=ScheduleKind.ZB_V, vpp=2),
    Case(Layout(pp=4), recompute=Recompute.SELECTIVE, schedule=ScheduleKind.ZB_H1),
]


def fill_vectors(engine: ForwardEngine) -> None:
    """Norms and biases start as 1 and 0, which would hide them."""
    storages = engine.storages
    for shard in engine.shard_map.shards(engine.mesh.world.rank):
        if len(shard.box.shape) == 1:
            whole = torch.sin(torch.arange(shard.box.hi[0], dtype=torch.float64) + len(shard.box.name)) / 4
            shard.view(storages).add_(whole[shard.box.slices])


def make_engine(world: World, name: str, dtype: torch.dtype, case: Case, *,
                batch_invariant: bool = True) -> TrainEngine:
    options = EngineOptions(dtype, case.sequence_parallel, temperature=TEMPERATURE, recompute=case.recompute,
                            chunks=case.schedule.chunks(case.layout.pp, case.vpp), batch_invariant=batch_invariant)
    engine = TrainEngine(MODELS[name], Mesh(Grid.of(case.layout), world), Head.LANGUAGE_MODEL, options,
                         train=TrainOptions(case.schedule), adamw=AdamWSettings(clip_grad_norm=None),
                         lr=LrSchedule(1e-3))
    engine.draw(seed=7)
    fill_vectors(engine)
    return engine


def alone(name: str, dtype: torch.dtype, case: Case = Case(), **options: bool) -> TrainEngine:
    return make_engine(World.single(torch.device("cpu")), name, dtype, case, **options)


def generated(engine: TrainEngine) -> Tensor:
    """Log-probs of the responses of `ragged_samples`, each row by itself from a cache, token after token."""
    stage = generation_stage(engine.model, engine.mesh, engine.options.dtype)
    stage.load_state_dict(engine.stage.state_dict())
    runner = NativeRunner(stage, sum_segments(engine.model))
    runner.prepare()
    runner.allocate(1)
    return torch.cat([_generated(runner, sample) for sample in ragged_samples(ROWS)])


def _generated(runner: NativeRunner, sample: Sample) -> Tensor:
    ids, start, found = torch.tensor((*sample.prompt, *sample.response)), 0, []
    table = torch.zeros(1, 1, dtype=torch.int32)
    for target, size in zip(sample.response, [len(sample.prompt)] + [1] * (len(sample.response) - 1), strict=True):
        span = torch.arange(start, start + size, dtype=torch.int32)
        chunks = (Chunk(0, size, 0, start),) if size > 1 else ()
        batch = StepBatch(int(size == 1), chunks, ids[start:start + size], span, torch.zeros_like(span), table,
                          torch.tensor([size - 1]))
        logits = runner.logits(runner.run(batch, None))
        found.append(native_rows.log_probs(logits, torch.tensor([target]), TEMPERATURE))
        start += size
    return torch.cat(found)


def sft_loss(output: Output, columns: TokenColumns, rows: TargetRows) -> tuple[Tensor, dict[str, Tensor]]:
    return supervised_loss(output.log_probs, columns)


class OnPolicy:
    """A loss that keeps how far each log-prob in training is from the same in scoring, and the entropies."""

    def __init__(self) -> None:
        self.largest_gap, self.seen, self.entropy = 0.0, 0, 0.0

    def __call__(self, output: Output, columns: TokenColumns, rows: TargetRows) -> tuple[Tensor, dict[str, Tensor]]:
        if output.log_probs.numel():
            gap = (output.log_probs.detach() - columns.old_log_probs).abs().max().item()
            self.largest_gap, self.seen = max(self.largest_gap, gap), self.seen + output.log_probs.numel()
            self.entropy += output.entropy.sum().item()
        loss, sums = sft_loss(output, columns, rows)
        return loss - 0.1 * (output.entropy * columns.weight).sum(), sums


def step(world: World, name: str, dtype: torch.dtype, cases: list[Case], batch_invariant: bool = True) -> list:
    """Of each case: log-probs of the rows at home here, gap and entropy of the step, and its canonical gradients."""
    found = []
    for case in cases:
        engine = make_engine(world, name, dtype, case, batch_invariant=batch_invariant)
        role = TrainedRole(engine, MicroBatching(case.scored_at_once), MicroBatching(case.trained_at_once),
                           Reduction(LossReduction.TOKEN_MEAN))
        batch, loss = ragged_batch(world, ROWS), OnPolicy()
        log_probs = role.answer_tokens(batch)
        role.update(batch.with_columns(old_log_probs=log_probs), range(ROWS), loss)
        found.append((log_probs, loss.largest_gap, loss.entropy if engine.answers else 0.0, canonical_grads(engine)))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_training_agrees_with_generation_in_one_process(name: str, dtype: torch.dtype):
    expected = generated(alone(name, dtype))
    ordinary = alone(name, dtype, batch_invariant=False)
    batch = MicroBatch.pack(ragged_samples(ROWS), device=torch.device("cpu"))
    distance = (ordinary.forward([batch])[0].log_probs - expected).abs().max().item()
    assert distance < {torch.float32: 1e-4, torch.bfloat16: 0.3, torch.float64: 1e-12}[dtype]
    for case in (Case(scored_at_once=1), Case(scored_at_once=ROWS), Case(recompute=Recompute.SELECTIVE)):
        [(found, gap, _, _)] = step(World.single(torch.device("cpu")), name, dtype, [case])
        assert torch.equal(found, expected) and gap == 0.0, case


@pytest.mark.parametrize(("name", "dtype"), [("rich", torch.float32), ("plain", torch.bfloat16),
                                             ("rich", torch.float64)], ids=str)
def test_training_agrees_with_generation_on_every_layout(name: str, dtype: torch.dtype):
    expected = generated(alone(name, dtype))
    by_rank = run_ranks(4, step, name, dtype, CASES)
    for number, case in enumerate(CASES):
        found = [rank[number] for rank in by_rank]
        assert torch.equal(found[0][0], expected), case
        assert [gap for _, gap, _, _ in found] == [0.0] * 4, case
    if dtype is torch.float64:
        _check_gradients(name, by_rank)


def _check_gradients(name: str, by_rank: list[list]) -> None:
    """The loss has log-probs and entropies; both are as in the ordinary mode, to rounding."""
    like = alone(name, torch.float64)
    [(_, _, entropy, one)] = step(like.mesh.world, name, torch.float64, [Case()], batch_invariant=False)
    expected = assemble(like, [one])
    for number, case in enumerate(CASES):
        grads = assemble(like, [rank[number][3] for rank in by_rank])
        for weight, grad in grads.items():
            assert (grad - expected[weight]).abs().max().item() <= 1e-10, (case, weight)
        assert sum(rank[number][2] for rank in by_rank) == pytest.approx(entropy, rel=1e-12), case


def test_eight_tensor_ranks():
    """More than there are key-value heads, and every segment of the sums on a rank of its own."""
    expected = generated(alone("rich", torch.float32))
    by_rank = run_ranks(8, step, "rich", torch.float32, [Case(Layout(tp=8), 4, sequence_parallel=True)])
    assert torch.equal(by_rank[0][0][0], expected)


def logits(world: World, name: str, dtype: torch.dtype, layouts: list[Layout]) -> list[Tensor]:
    found = []
    for layout in layouts:
        stage = make_engine(world, name, dtype, Case(layout)).stage
        batch = MicroBatch.pack(ragged_samples(ROWS), device=torch.device("cpu"))
        with torch.no_grad():
            hidden = stage.forward_hidden(batch.input_ids, batch.position_ids, stage.attend(batch))
            found.append(stage.logits(hidden))
    return found


def test_logits_are_the_same_for_every_tp():
    [expected] = logits(World.single(torch.device("cpu")), "rich", torch.bfloat16, [Layout()])
    for found in run_ranks(4, logits, "rich", torch.bfloat16, [Layout(tp=2, dp=2), Layout(tp=4)]):
        assert all(torch.equal(one, expected) for one in found)


@pytest.mark.parametrize("recompute", [Recompute.SELECTIVE, Recompute.FULL])
def test_recomputation_changes_no_gradient(recompute: Recompute):
    world = World.single(torch.device("cpu"))
    [*_, (_, _, _, kept)] = step(world, "rich", torch.float32, [Case()])
    [*_, (_, _, _, again)] = step(world, "rich", torch.float32, [Case(recompute=recompute)])
    assert all(torch.equal(kept[box], again[box]) for box in kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_in_the_dtypes_we_ship(dtype: torch.dtype):
    world = World.single(torch.device("cpu"))
    grads = [assemble(alone("rich", torch.float64), [{box: grad.double() for box, grad in found[3].items()}])
             for mode in (True, False) for found in step(world, "rich", dtype, [Case()], mode)]
    for name, grad in grads[0].items():
        scale = grads[1][name].abs().max().item()
        assert (grad - grads[1][name]).abs().max().item() <= scale * {torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]


def test_weights_are_packed_once_for_a_call_and_anew_for_the_next():
    engine = alone("plain", torch.float64)
    batch = MicroBatch.pack(ragged_samples(3), device=torch.device("cpu"))
    before = engine.forward([batch, batch])
    for weight in engine.storages.values():
        weight.mul_(1.5)
    after, ordinary = engine.forward([batch])[0], alone("plain", torch.float64, batch_invariant=False)
    for name, weight in ordinary.storages.items():
        weight.copy_(engine.storages[name])
    assert torch.equal(before[0].log_probs, before[1].log_probs)
    torch.testing.assert_close(after.log_probs, ordinary.forward([batch])[0].log_probs, rtol=0, atol=1e-12)
    assert engine.stage.packed is not None and engine.stage.packed.num_kept == 0
