"""Rule 1 for losses of whole rows: steps on pairs and on answers are those of one process, for every layout and cut."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hybridflow.algorithms.kto import reference_point
from hybridflow.algorithms.preference import BradleyTerryObjective, Counts, DpoObjective, KtoObjective
from hybridflow.algorithms.reduction import LossReduction
from hybridflow.data.preference import LabelledExample, PairExample
from hybridflow.engine.native import TrainEngine
from hybridflow.engine.options import TrainOptions
from hybridflow.micro_batch import Sample
from hybridflow.models.config import Head
from hybridflow.packing import MicroBatching
from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.world import World
from hybridflow.trainer.preference_update import (
    label_samples,
    learn_log_ratios,
    learn_scores,
    log_ratio_loss_of,
    mismatched_samples,
    pair_margins,
    pair_samples,
    score_loss_of,
)
from hybridflow.trainer.reference import Reference
from hybridflow.trainer.roles import Reduction, ScoringRole, TrainedRole
from hybridflow.trainer.row_numbers import response_log_probs, row_scores
from tests.engine.models import assemble, canonical_grads, ragged_samples, tiny_model, train_engine
from tests.ranks import run_ranks

ALONE = (Layout(), MicroBatching(rows=8), 1, False, ScheduleKind.ONE_F_ONE_B)
CASES = [  # layout, what runs at once (pairs), vpp, sequence parallel, schedule; pairs have up to 17 tokens
    (Layout(tp=2, dp=2), MicroBatching(rows=1), 1, True, ScheduleKind.ONE_F_ONE_B),
    (Layout(pp=2, dp=2), MicroBatching(rows=1), 1, False, ScheduleKind.ONE_F_ONE_B),
    (Layout(pp=2, dp=2), MicroBatching(tokens=40), 2, False, ScheduleKind.ZB_V),
    (Layout(cp=2, dp=2), MicroBatching(rows=2), 1, False, ScheduleKind.ONE_F_ONE_B),
    (Layout(cp=2, tp=2), MicroBatching(tokens=44), 1, True, ScheduleKind.GPIPE),
    (Layout(cp=4), MicroBatching(rows=1), 1, False, ScheduleKind.GPIPE),
    (Layout(dp=4), MicroBatching(rows=1), 1, False, ScheduleKind.ONE_F_ONE_B),
    (Layout(dp=4), MicroBatching(tokens=60), 1, False, ScheduleKind.GPIPE),
]


def pairs(count: int) -> list[PairExample]:
    """Ragged pairs, the two responses of very different lengths."""
    rows = ragged_samples(2 * count, seed=3)
    return [PairExample(i, one.prompt, one.response, other.response * 2 if i % 2 else other.response, 0.25 * i)
            for i, (one, other) in enumerate(zip(rows[::2], rows[1::2]))]


def engine_of(world: World, case: tuple, head: Head) -> TrainEngine:
    layout, _, vpp, sequence_parallel, schedule = case
    return train_engine(world, layout, tiny_model(), head, train=TrainOptions(schedule), vpp=vpp,
                        sequence_parallel=sequence_parallel)


def role_of(engine: TrainEngine, at_once: MicroBatching) -> TrainedRole:
    return TrainedRole(engine, at_once, at_once, Reduction(LossReduction.SEQ_MEAN_TOKEN_MEAN))


def given(count: int, offset: float) -> torch.Tensor:
    """Log-probs of a reference that is not the model."""
    return offset - torch.arange(count, dtype=torch.float64)


def dpo(role: TrainedRole, examples: list[PairExample]):
    samples = pair_samples(examples)
    loss = partial(log_ratio_loss_of, DpoObjective(0.3, label_smoothing=0.1), Counts(len(examples)), 0.3)
    reference = given(len(samples), -4.0)
    return learn_log_ratios(role, samples, reference, torch.zeros_like(reference), loss, together=2,
                            trained=[row % 2 == 0 for row in range(len(samples))])


def kto(role: TrainedRole, examples: list[PairExample]):
    labelled = [LabelledExample(pair.row, pair.prompt_ids, response, good) for pair in examples
                for response, good in ((pair.chosen_ids, True), (pair.rejected_ids, False))][:-1]
    samples = label_samples(labelled)
    others = mismatched_samples(samples)
    z0 = reference_point(response_log_probs(role, others), given(len(others), -9.0))
    labels = torch.tensor([float(one.desirable) for one in labelled], dtype=torch.float64)
    loss = partial(log_ratio_loss_of, KtoObjective(0.2, z0, 1.2, 0.8), Counts(len(labelled), int(labels.sum())), 0.0)
    return learn_log_ratios(role, samples, given(len(samples), -4.0), labels, loss)


def reward_model(role: TrainedRole, examples: list[PairExample]):
    loss = partial(score_loss_of, BradleyTerryObjective(0.1), Counts(len(examples)))
    return learn_scores(role, pair_samples(examples), pair_margins(examples), loss)


KINDS = {
    "dpo": (Head.LANGUAGE_MODEL, dpo),
    "kto": (Head.LANGUAGE_MODEL, kto),
    "reward_model": (Head.SCORE, reward_model),
}


def steps(world: World, kind: str, count: int, cases: list[tuple]) -> list[tuple]:
    """For each case: loss sums, gradient norm and this rank's canonical gradients of one update."""
    head, learn = KINDS[kind]
    results = []
    for case in cases:
        engine = engine_of(world, case, head)
        update = learn(role_of(engine, case[1]), pairs(count))
        results.append((update.sums, update.step.grad_norm, canonical_grads(engine)))
    return results


@pytest.mark.parametrize(("kind", "count"), [("dpo", 3), ("kto", 3), ("reward_model", 5)])
def test_a_step_is_that_of_one_process(kind: str, count: int):
    world = World.single(torch.device("cpu"))
    [(sums, norm, alone)] = steps(world, kind, count, [ALONE])
    engine = engine_of(world, ALONE, KINDS[kind][0])
    expected = assemble(engine, [alone])
    assert norm > 1e-3 and sums["loss"] > 0
    by_rank = run_ranks(4, steps, kind, count, CASES)
    for number, case in enumerate(CASES):
        for name, grad in assemble(engine, [rank[number][2] for rank in by_rank]).items():
            assert (grad - expected[name]).abs().max().item() <= 1e-9, (case, name)
        for rank in by_rank:
            assert rank[number][1] == pytest.approx(norm, rel=1e-9), case
            assert rank[number][0] == pytest.approx(sums, rel=1e-9, abs=1e-12), case


# --- one number a row, and the reference ------------------------------------------------------------------------------

SAMPLES = (*ragged_samples(5, seed=1), Sample((1, 2), (3,) * 9))


def numbers(world: World, layout: Layout) -> tuple[list[float], list[float]]:
    case = (layout, MicroBatching(rows=2), 1, False, ScheduleKind.GPIPE)
    told = []
    for head, ask in ((Head.LANGUAGE_MODEL, response_log_probs), (Head.SCORE, row_scores)):
        told.append(ask(role_of(engine_of(world, case, head), case[1]), SAMPLES).tolist())
    return tuple(told)


@pytest.mark.parametrize("layout", [Layout(cp=2, pp=2), Layout(dp=4), Layout(tp=2, dp=2)])
def test_every_rank_knows_the_number_of_each_row(layout: Layout):
    alone = numbers(World.single(torch.device("cpu")), Layout())
    for rank in run_ranks(4, numbers, layout):
        for found, expected in zip(rank, alone, strict=True):
            assert found == pytest.approx(expected, rel=1e-12)


def test_a_precomputed_reference_says_the_same_and_is_given_up():
    world = World.single(torch.device("cpu"))
    engine = engine_of(world, ALONE, Head.LANGUAGE_MODEL)
    reference = Reference(ScoringRole(engine, MicroBatching(rows=2)))
    examples = pairs(4)
    asked = reference.of([2, 0], pair_samples([examples[2], examples[0]]))
    reference.precompute([one.row for one in examples], pair_samples(examples))
    assert reference.role is None
    assert reference.of([2, 0], pair_samples([examples[2], examples[0]])).tolist() == pytest.approx(asked.tolist())
