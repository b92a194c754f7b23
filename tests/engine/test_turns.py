"""An engine that waits on the host between its turns: used outside of one it says so, and nothing is lost."""

import pytest
import torch

from hybridflow.algorithms.losses import supervised_loss
from hybridflow.algorithms.reduction import LossReduction
from hybridflow.engine.native import TrainEngine
from hybridflow.engine.options import EngineOptions, TrainOptions
from hybridflow.models.config import Head
from hybridflow.packing import MicroBatching
from hybridflow.parallel.collectives import Pending
from hybridflow.parallel.comm_hook import GradBucket, plain
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.optimizer import LrSchedule
from hybridflow.parallel.optimizer_state import AdamWSettings
from hybridflow.parallel.world import World
from hybridflow.trainer.roles import Reduction, TrainedRole
from tests.engine.models import ragged_batch, tiny_model
from tests.ranks import run_ranks

ROWS = 6
PLAIN = TrainOptions()


def sft(output, columns, rows):
    return supervised_loss(output.log_probs, columns)


def role_of(world: World, offload: bool, train: TrainOptions = PLAIN) -> TrainedRole:
    layout = Layout(dp=world.size)
    engine = TrainEngine(tiny_model(), Mesh(Grid.of(layout), world), Head.LANGUAGE_MODEL,
                         EngineOptions(torch.float64, offload=offload), train=train, adamw=AdamWSettings(),
                         lr=LrSchedule(1e-3))
    engine.draw(seed=7)
    engine.end_turn()
    return TrainedRole(engine, MicroBatching(2), MicroBatching(2), Reduction(LossReduction.TOKEN_MEAN))


def test_turns_change_no_number():
    world = World.single(torch.device("cpu"))
    batch, norms = ragged_batch(world, ROWS), []
    for offload in (False, True):
        role = role_of(world, offload)
        norms.append([role.update(batch, range(ROWS), sft).step.grad_norm for _ in range(3)])
        norms[-1].append(role.answer_tokens(batch).sum().item())
    assert norms[0] == norms[1]


def test_outside_of_its_turn_an_engine_says_so():
    world = World.single(torch.device("cpu"))
    role, batch = role_of(world, offload=True), ragged_batch(world, ROWS)
    for use in (lambda: role.trainer.train([], sft), lambda: role.trainer.forward([]), lambda: role.trainer.draw(1)):
        with pytest.raises(RuntimeError, match="waits on the host"):
            use()
    before = role.answer_tokens(batch)
    role.trainer.end_turn()  # it has ended: nothing happens
    with role.trainer.on_device(), role.trainer.on_device():
        role.trainer.end_turn()  # early
    assert torch.equal(role.answer_tokens(batch), before)


class Broken(Exception):
    """What the hook raises."""


class BreaksOnce:
    """A hook that raises at the third bucket that it sees, on every rank."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, bucket: GradBucket) -> Pending:
        self.calls += 1
        if self.calls == 3:
            raise Broken
        return plain(bucket)


def goes_on(world: World) -> tuple[float, float]:
    """Gradient norms of the step after a broken one, and of a first step."""
    batch, norms = ragged_batch(world, ROWS), []
    for hook in (BreaksOnce(), None):
        role = role_of(world, offload=False, train=TrainOptions(bucket_bytes=1, hook=hook))
        if hook is not None:
            with pytest.raises(Broken):
                role.update(batch, range(ROWS), sft)
        norms.append(role.update(batch, range(ROWS), sft).step.grad_norm)
    return tuple(norms)


def test_a_step_that_raised_leaves_nothing_behind():
    for after, first in run_ranks(2, goes_on):
        assert after == pytest.approx(first, rel=1e-12)
