"""Rule 1: the gradient of an optimizer batch is that of one process, for every layout and micro-batch size."""

import pytest
import torch

from hybridflow.algorithms.kl import KlEstimator
from hybridflow.algorithms.losses import Clip, supervised_loss
from hybridflow.algorithms.objectives import ActorObjective, CriticObjective
from hybridflow.algorithms.reduction import LossReduction
from hybridflow.engine.options import TrainOptions
from hybridflow.models.config import Head
from hybridflow.packing import MicroBatching
from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.world import World
from hybridflow.trainer.roles import Reduction, TrainedRole
from tests.engine.models import assemble, canonical_grads, ragged_batch, tiny_model, train_engine
from tests.ranks import run_ranks

ROWS = 10
ACTOR = ActorObjective(Clip(0.2, 0.3, dual=2.0), entropy_coef=0.01, kl_estimator=KlEstimator.K3, kl_coef=0.1)
CRITIC = CriticObjective(value_clip=0.2, coef=0.5)
LOSSES = {
    "actor": (Head.LANGUAGE_MODEL, lambda out, columns, rows: ACTOR(out.log_probs, out.entropy, columns, rows)),
    "critic": (Head.VALUE, lambda out, columns, rows: CRITIC(out, columns)),
    "sft": (Head.LANGUAGE_MODEL, lambda out, columns, rows: supervised_loss(out.log_probs, columns)),
}
CASES = [  # layout, micro-batch size, sequence parallel, layers per stage, schedule
    (Layout(1, 1, 4), 1, False, None, ScheduleKind.ONE_F_ONE_B),
    (Layout(1, 1, 4), 8, False, None, ScheduleKind.GPIPE),
    (Layout(2, 1, 2), 1, False, None, ScheduleKind.ONE_F_ONE_B),
    (Layout(2, 1, 2), 3, True, None, ScheduleKind.ONE_F_ONE_B),
    (Layout(4, 1, 1), 2, False, None, ScheduleKind.ONE_F_ONE_B),
    (Layout(4, 1, 1), 10, True, None, ScheduleKind.ONE_F_ONE_B),
    (Layout(1, 2, 2), 1, False, (3, 1), ScheduleKind.ONE_F_ONE_B),
    (Layout(1, 2, 2), 2, False, None, ScheduleKind.GPIPE),
    (Layout(1, 4, 1), 1, False, None, ScheduleKind.ONE_F_ONE_B),
    (Layout(1, 4, 1), 4, False, None, ScheduleKind.GPIPE),
    (Layout(2, 2, 1), 1, True, (1, 3), ScheduleKind.ONE_F_ONE_B),
    (Layout(2, 2, 1), 3, False, None, ScheduleKind.GPIPE),
    (Layout(2, 2, 1), 16, True, None, ScheduleKind.ONE_F_ONE_B),
]


def gradients(world: World, kind: str, reduction: Reduction, tied: bool, cases: list) -> list:
    """For each case: loss sums, gradient norm and this rank's canonical gradients after one update's backward."""
    head, loss = LOSSES[kind]
    results = []
    for layout, micro_batch_size, sequence_parallel, layers, schedule in cases:
        engine = train_engine(world, layout, tiny_model(tie_word_embeddings=tied), head,
                              train=TrainOptions(schedule), sequence_parallel=sequence_parallel,
                              layers_per_chunk=layers, temperature=0.7)
        role = TrainedRole(engine, MicroBatching(4), MicroBatching(micro_batch_size), reduction)
        update = role.update(ragged_batch(world, ROWS), range(ROWS), loss)
        # The step clipped nothing and left the reduced gradients as they were.
        results.append((update.sums, update.step.grad_norm, canonical_grads(engine)))
    return results


ALONE = (Layout(1, 1, 1), 4, False, None, ScheduleKind.GPIPE)


@pytest.mark.parametrize("kind, reduction, tied", [
    ("actor", Reduction(LossReduction.TOKEN_MEAN), False),
    ("actor", Reduction(LossReduction.SEQ_MEAN_TOKEN_MEAN), True),
    ("critic", Reduction(LossReduction.TOKEN_MEAN), False),
    ("critic", Reduction(LossReduction.CONSTANT_LENGTH, 6), False),
    ("sft", Reduction(LossReduction.SEQ_MEAN_TOKEN_SUM), True),
])
def test_the_gradient_is_that_of_one_process(kind: str, reduction: Reduction, tied: bool):
    world = World.single(torch.device("cpu"))
    engine = train_engine(world, Layout(), tiny_model(tie_word_embeddings=tied), LOSSES[kind][0])
    [(sums, norm, alone)] = gradients(world, kind, reduction, tied, [ALONE])
    expected = assemble(engine, [alone])
    direct = torch.sqrt(sum(grad.square().sum() for grad in expected.values())).item()
    assert norm == pytest.approx(direct, rel=1e-12)
    by_rank = run_ranks(4, gradients, kind, reduction, tied, CASES)
    for number, case in enumerate(CASES):
        grads = assemble(engine, [rank[number][2] for rank in by_rank])
        for name, grad in grads.items():
            largest = (grad - expected[name]).abs().max().item()
            assert largest <= 1e-9, (case, name, largest)
        for rank in by_rank:
            assert rank[number][1] == pytest.approx(norm, rel=1e-9), case
            assert rank[number][0] == pytest.approx(sums, rel=1e-9, abs=1e-12), case
