"""Weights sent from optimizer shares straight to generation: bit for bit what an all-gather and a reshard give."""

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.losses import supervised_loss
from hybridflow.algorithms.reduction import LossReduction
from hybridflow.engine.native import TrainEngine, Update
from hybridflow.engine.options import EngineOptions, TrainOptions
from hybridflow.generation.engine import StaleWeightsError
from hybridflow.generation.records import Prompt, SamplingParams
from hybridflow.generation.weight_home import WeightMode
from hybridflow.hybrid_engine import HybridEngine, generation_grid, own_engine
from hybridflow.models.config import Head
from hybridflow.models.weights import decoder_shard_map
from hybridflow.packing import MicroBatching
from hybridflow.parallel.box import Box
from hybridflow.parallel.checksum import IntegrityError
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.optimizer import LrSchedule
from hybridflow.parallel.optimizer_state import AdamWSettings
from hybridflow.parallel.plan import lower_bound_numel
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.share import TRAINING
from hybridflow.parallel.world import World
from hybridflow.trainer.roles import Reduction, TrainedRole
from hybridflow.weight_route import ReshardCheck
from tests.engine.models import ragged_batch, tiny_model, train_engine
from tests.ranks import run_ranks

ROWS = 6
PARAMS = SamplingParams(max_new_tokens=2)
PROMPTS = [Prompt(number, 0, (1 + number, 2)) for number in range(3)]


@dataclass(frozen=True)
class Case:
    """One way to train, and the layout to generate in."""

    train: Layout
    generation: Layout
    zero_stage: int = 1
    dtype: torch.dtype = torch.float32
    offload: bool = False
    vpp: int = 1
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    tied: bool = False
    bucket_bytes: int = 1 << 20
    weights: WeightMode = WeightMode.PACKED


CASES = (
    Case(Layout(tp=2, dp=2), Layout(tp=1, dp=4)),
    Case(Layout(tp=2, dp=2), Layout(tp=4), dtype=torch.bfloat16, tied=True),
    Case(Layout(pp=2, dp=2), Layout(tp=2, dp=2), zero_stage=2, dtype=torch.bfloat16, bucket_bytes=3000),
    Case(Layout(dp=4), Layout(tp=2, dp=2), offload=True, dtype=torch.bfloat16),
    Case(Layout(dp=2, cp=2), Layout(dp=4), zero_stage=2, offload=True, bucket_bytes=3000),
    Case(Layout(pp=2, dp=2), Layout(dp=4), vpp=2, schedule=ScheduleKind.ZB_V, tied=True),
    Case(Layout(tp=2, pp=2), Layout(dp=4)),
    Case(Layout(tp=2, dp=2), Layout(tp=2, dp=2), zero_stage=0),
    Case(Layout(tp=2, dp=2), Layout(tp=1, dp=4), weights=WeightMode.SHARED),
    Case(Layout(tp=2, dp=2), Layout(tp=4), weights=WeightMode.SHARED, tied=True, bucket_bytes=3000),
    Case(Layout(pp=2, dp=2), Layout(tp=2, dp=2), weights=WeightMode.SHARED, zero_stage=2, dtype=torch.bfloat16),
    Case(Layout(dp=2, cp=2), Layout(dp=4), weights=WeightMode.SHARED, offload=True, dtype=torch.bfloat16),
    Case(Layout(pp=2, dp=2), Layout(tp=4), weights=WeightMode.SHARED, vpp=2, schedule=ScheduleKind.ZB_V),
)


class Actor:
    """An engine with its role and its generator."""

    def __init__(self, world: World, case: Case) -> None:
        options = TrainOptions(case.schedule, zero_stage=case.zero_stage, bucket_bytes=9000,
                               offload_optimizer=case.offload, max_nonfinite_steps=None)
        model = tiny_model(tie_word_embeddings=case.tied)
        self.engine = train_engine(world, case.train, model, Head.LANGUAGE_MODEL, train=options, vpp=case.vpp,
                                   dtype=case.dtype)
        grid = generation_grid(self.engine.shard_map, self.engine.mesh.grid, model, case.generation)
        self.hybrid = HybridEngine(self.engine, Mesh(grid, world), partial(own_engine, weights=case.weights),
                                   bucket_bytes=case.bucket_bytes, check=ReshardCheck.ALL)
        self.role = TrainedRole(self.engine, MicroBatching(2), MicroBatching(2), Reduction(LossReduction.TOKEN_MEAN))
        self.world = world
        self.hybrid.generator.wake = self._note_and_wake

    def update(self, step: int, direct: bool, spoilt: bool = False) -> Update:
        factor = math.nan if spoilt else 1.0

        def loss(output, columns, rows) -> tuple[Tensor, dict[str, Tensor]]:
            term, sums = supervised_loss(output.log_probs, columns)
            return term * factor, sums

        return self.role.update(ragged_batch(self.world, ROWS, seed=step), range(ROWS), loss,
                                self.hybrid if direct else None)

    def generated(self) -> dict[Box, Tensor]:
        return {shard.box: shard.view(self.filled).clone()
                for shard in self.hybrid.home.shard_map.shards(self.world.rank)}

    def _note_and_wake(self, version: int) -> None:
        """What was filled in is copied before the generator lays it out anew."""
        self.filled = {name: tensor.clone() for name, tensor in self._storages().items()}
        type(self.hybrid.generator).wake(self.hybrid.generator, version)

    def _storages(self) -> dict[str, Tensor]:
        return self.hybrid.home.storages or {name: p.data for name, p in self.hybrid.generator.stage.named_parameters()}

    def answers(self) -> str:
        return repr(self.hybrid.generator.generate(PROMPTS, PARAMS, 0, expected_version=self.engine.version))


def same(direct: TrainEngine, gathered: TrainEngine) -> bool:
    pairs = [(direct.storages, gathered.storages), (direct.optimizer.storages(), gathered.optimizer.storages())]
    return all(torch.equal(mine[name], other[name]) for mine, other in pairs for name in mine)


def direct_is_gathered(world: World, case: Case) -> tuple[int, int]:
    """Updates with and without a reshard, a skipped step, and a fill in between. (received, bound) of one reshard."""
    one, other = Actor(world, case), Actor(world, case)
    for step, (direct, spoilt) in enumerate([(True, False), (False, False), (True, True), (True, False)]):
        mine, theirs = one.update(step, direct, spoilt), other.update(step, False, spoilt)
        assert repr(mine) == repr(theirs) and mine.step.skipped is spoilt  # a norm of NaN equals nothing
        assert same(one.engine, other.engine), (case, step)
        other.hybrid.fill()
        if not direct:
            assert one.hybrid.is_current is (one.hybrid.generator.weight_version == one.engine.version)
            one.hybrid.fill()
        assert one.hybrid.is_current and one.engine.version == other.engine.version
        wanted = other.generated()
        assert all(torch.equal(values, wanted[box]) for box, values in one.generated().items()), (case, step)
        assert one.answers() == other.answers()
        one.hybrid.free()
        other.hybrid.free()
    report = one.hybrid.last_report
    return report.received_bytes, report.lower_bound_bytes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_direct_equals_all_gathered_bit_for_bit(case: Case):
    assert all(received == bound for received, bound in run_ranks(4, direct_is_gathered, case))


def memory(world: World, case: Case) -> tuple[int, int, int]:
    """What a fill received, its lower bound, and the memory that it took for weights, which is all it took."""
    actor = Actor(world, case)
    before = {name: tensor.data_ptr() for name, tensor in actor.engine.storages.items()}
    actor.hybrid.fill()
    report, home = actor.hybrid.last_report, actor.hybrid.home
    in_training = {tensor.data_ptr() for name, tensor in home.storages.items() if name.startswith(TRAINING)}
    assert in_training == set(before.values())
    own = sum(tensor.nbytes for name, tensor in home.storages.items() if not name.startswith(TRAINING))
    assert own == home.taken_bytes
    if report.received_bytes == 0:
        assert report.extra_bytes == own
    actor.hybrid.free()
    assert home.storages == {} and {name: t.data_ptr() for name, t in actor.engine.storages.items()} == before
    return report.received_bytes, report.lower_bound_bytes, own


@pytest.mark.parametrize(("train", "generation"), [
    (Layout(tp=2, dp=2), Layout(tp=2, dp=2)), (Layout(tp=2, dp=2), Layout(tp=4)), (Layout(dp=4), Layout(dp=4)),
    (Layout(tp=4), Layout(tp=2, dp=2)), (Layout(pp=4), Layout(dp=4)), (Layout(tp=2, pp=2), Layout(tp=4))], ids=str)
def test_shared_weights_take_no_more_memory_than_what_must_be_received(train: Layout, generation: Layout):
    """0 bytes received and 0 allocated where each generation shard lies in a training shard."""
    is_inside = train.pp == 1 and generation.tp % train.tp == 0
    case = Case(train, generation, weights=WeightMode.SHARED)
    for received, bound, own in run_ranks(4, memory, case):
        assert received == bound == own and (own == 0) is is_inside


def answers_of(world: World) -> list[tuple]:
    """Answers after an update: with either home, and those of a fresh generator of the same weights."""
    said = []
    for weights in WeightMode:
        actor = Actor(world, Case(Layout(tp=2, dp=2), Layout(tp=1, dp=4), dtype=torch.float64, weights=weights))
        actor.hybrid.fill()
        before = actor.answers()
        actor.update(0, direct=True)
        answers = actor.hybrid.generator.generate(PROMPTS, PARAMS, 0, expected_version=actor.engine.version)
        assert before != repr(answers)
        fresh = HybridEngine(actor.engine, actor.hybrid.mesh, partial(own_engine, weights=weights),
                             bucket_bytes=1 << 20)
        fresh.fill()
        again = fresh.generator.generate(PROMPTS, PARAMS, 0, expected_version=1)
        assert repr(again) == repr(answers)  # nothing that was cached under the weights before is left
        with pytest.raises(StaleWeightsError):
            actor.hybrid.generator.generate(PROMPTS, PARAMS, 0, expected_version=0)
        said.append([(answer.response_ids, answer.log_probs) for answer in answers])
    return said


def test_both_homes_and_a_fresh_generator_answer_alike():
    for shared, packed in run_ranks(4, answers_of):
        for (ids, log_probs), (other_ids, other_log_probs) in zip(shared, packed, strict=True):
            assert ids == other_ids and log_probs == pytest.approx(other_log_probs, abs=1e-12)


def test_an_engine_that_waits_on_the_host_shares_nothing():
    world = World.single(torch.device("cpu"))
    mesh = Mesh(Grid.of(Layout()), world)
    engine = TrainEngine(tiny_model(), mesh, Head.LANGUAGE_MODEL, EngineOptions(offload=True), train=TrainOptions(),
                         adamw=AdamWSettings(), lr=LrSchedule(1e-3))
    with pytest.raises(ValueError, match="choose packed weights"):
        HybridEngine(engine, mesh, partial(own_engine, weights=WeightMode.SHARED), bucket_bytes=1 << 20)


def spoilt(world: World, check: ReshardCheck, weights: WeightMode) -> str:
    """What the reshard says of one flipped bit in what has come to rank 1, and that no rank generates then."""
    actor = Actor(world, Case(Layout(tp=2, dp=2), Layout(dp=4)))
    hybrid = HybridEngine(actor.engine, actor.hybrid.mesh, partial(own_engine, weights=weights),
                          bucket_bytes=1 << 20, check=check)
    verify = hybrid.from_training.verify

    def after_a_flip(src: dict[str, Tensor], dst: dict[str, Tensor], version: int) -> None:
        for name, tensor in dst.items():
            if world.rank == 1 and "down" in name and not name.startswith(TRAINING):
                tensor.view(torch.int32).view(-1)[-1] ^= 1
        verify(src, dst, version)

    hybrid.from_training.verify = after_a_flip
    try:
        hybrid.fill()
    except IntegrityError as error:
        with pytest.raises(StaleWeightsError):
            hybrid.generator.generate(PROMPTS, PARAMS, 0, expected_version=actor.engine.version)
        return str(error)
    return ""


@pytest.mark.parametrize("weights", WeightMode)
def test_a_flipped_bit_is_found_and_named(weights: WeightMode):
    said = run_ranks(4, spoilt, ReshardCheck.ALL, weights)
    assert "version 0 are wrong on rank 1" in said[1] and "mlp.down_proj.weight" in said[1]
    for rank in (0, 2, 3):
        assert f"wrong on rank 1, though not on rank {rank}" in said[rank] and "mlp.down_proj.weight" in said[rank]
    assert run_ranks(4, spoilt, ReshardCheck.OFF, weights) == ["", "", "", ""]


def moved(world: World, case: Case) -> tuple[int, int, int]:
    """Bytes that the reshard after a step received, the bound of a plain reshard, and bytes of whole matrices."""
    actor = Actor(world, case)
    actor.update(0, direct=True)
    wanted = decoder_shard_map(actor.engine.model, actor.hybrid.mesh.grid, Head.LANGUAGE_MODEL)
    plain = lower_bound_numel(actor.engine.shard_map, wanted, world.rank) * case.dtype.itemsize
    return actor.hybrid.last_report.received_bytes, plain, sum(
        math.prod(shape) for shape in wanted.shapes.values()) * case.dtype.itemsize


@pytest.mark.parametrize("case", [Case(Layout(dp=4), Layout(tp=2, dp=2)), Case(Layout(dp=4), Layout(tp=1, dp=4))],
                         ids=str)
def test_what_is_received_is_the_generation_shard_without_the_share(case: Case):
    """Where the training shard lies in the generation shard, or the reverse: the larger of both less M / (t p d)."""
    for received, plain, model in run_ranks(4, moved, case):
        assert plain == 0
        assert received == pytest.approx(model - model / 4, rel=0.03)  # buckets are padded to equal shares


def order(world: World) -> list[tuple[str, int]]:
    """What the reshard did: ("step", bucket) and ("round", number), in order."""
    actor = Actor(world, Case(Layout(dp=4), Layout(dp=4), bucket_bytes=6000))
    done: list[tuple[str, int]] = []
    step, travel = actor.engine.optimizer.step_bucket, actor.hybrid.after_step.round

    def stepping(bucket: int) -> None:
        done.extend([("step", bucket)] if bucket in actor.engine.optimizer.waiting else [])
        step(bucket)

    def travelling(number: int, *storages: dict[str, Tensor]) -> None:
        done.append(("round", number))
        travel(number, *storages)

    actor.engine.optimizer.step_bucket, actor.hybrid.after_step.round = stepping, travelling
    actor.update(0, direct=True)
    assert sorted(n for what, n in done if what == "step") == list(range(len(actor.engine.grads.buckets)))
    return done


def test_buckets_travel_before_later_ones_have_stepped():
    for done in run_ranks(4, order):
        assert [number for what, number in done if what == "round"] == list(range(len(done) - sum(
            what == "step" for what, _ in done)))
        first_round = done.index(("round", 0))
        assert any(what == "step" for what, _ in done[:first_round])
        assert any(what == "step" for what, _ in done[first_round:])
