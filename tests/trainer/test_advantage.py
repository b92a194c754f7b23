"""Advantages over ranks by hand: rows whose reward failed are in no mean, and the KL is charged and reported."""

import math
from copy import deepcopy

import pytest
import torch

from hybridflow.algorithms.kl import AdaptiveKl, KlEstimator
from hybridflow.batch import Batch
from hybridflow.crew import Crew
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.parallel.world import World
from hybridflow.trainer.advantage import GrpoAdvantages, KlPenalty, PpoAdvantages
from tests.ranks import run_ranks

LENGTHS = (1, 3, 2)
NAN = float("nan")


def batch_of(world: World, scores: list[float]) -> Batch:
    """Three answers to one prompt; the policy is log 2 above the reference on every token, and all values are 0."""
    home = tuple(tuple(range(rank, len(LENGTHS), world.size)) for rank in range(world.size))
    samples = tuple(Sample((5,), (1,) * LENGTHS[row]) for row in home[world.rank])
    zeros = torch.zeros(sum(LENGTHS[row] for row in home[world.rank]), dtype=torch.float64)
    columns = TokenColumns(rollout_log_probs=zeros - 1.0, ref_log_probs=zeros - 1.0 - math.log(2), old_values=zeros)
    return Batch((1,) * len(LENGTHS), LENGTHS, (0,) * len(LENGTHS), home, samples, columns,
                 torch.tensor(scores, dtype=torch.float64))


def by_row(world: World, batch: Batch, column: torch.Tensor) -> dict[int, list[float]]:
    parts = column.split(batch.home_lengths(world.rank))
    return {row: part.tolist() for row, part in zip(batch.home[world.rank], parts)}


def estimate(world: World, advantages: PpoAdvantages | GrpoAdvantages, scores: list[float]) -> tuple:
    batch, metrics = advantages(batch_of(world, scores), Crew.whole(world))
    columns = batch.columns
    return by_row(world, batch, columns.advantages), by_row(world, batch, columns.loss_mask), metrics, advantages


def on_one_and_two_ranks(advantages: PpoAdvantages | GrpoAdvantages, scores: list[float]) -> list[tuple]:
    """Advantages and masks of all rows, metrics and the state afterwards; of one process, then of two ranks."""
    outcomes = [[estimate(World.single(torch.device("cpu")), deepcopy(advantages), scores)],
                run_ranks(2, estimate, deepcopy(advantages), scores)]
    told = []
    for ranks in outcomes:
        rows = {row: values for found, *_ in ranks for row, values in found.items()}
        masks = {row: values for _, found, *_ in ranks for row, values in found.items()}
        assert all(metrics == pytest.approx(ranks[0][2]) for _, _, metrics, _ in ranks)
        told.append((rows, masks, ranks[0][2], ranks[-1][3]))
    return told


MASKS = {0: [1.0], 1: [0.0] * 3, 2: [1.0] * 2}


def test_a_failed_reward_is_in_no_moment_and_not_trained():
    for rows, masks, metrics, _ in on_one_and_two_ranks(PpoAdvantages(1.0, 1.0, True), [1.0, NAN, 4.0]):
        # Of the three trained tokens one has advantage 1 and two have 4: mean 3, variance 2.
        assert masks == MASKS
        assert metrics == pytest.approx({"advantage/mean": 3.0, "advantage/std": 2**0.5})
        assert rows[0] == pytest.approx([-(2**0.5)]) and rows[2] == pytest.approx([0.5**0.5] * 2)
        assert rows[1] == [0.0] * 3


def test_a_failed_reward_is_not_in_its_group():
    for rows, masks, _, _ in on_one_and_two_ranks(GrpoAdvantages(normalise_by_std=False), [1.0, NAN, 4.0]):
        assert masks == MASKS
        assert rows == {0: [-1.5], 1: [0.0] * 3, 2: [1.5] * 2}


@pytest.mark.parametrize("estimator, of_token", [
    (KlEstimator.K1, math.log(2)), (KlEstimator.K2, math.log(2) ** 2 / 2), (KlEstimator.K3, math.log(2) - 0.5),
])
def test_the_kl_is_charged_and_reported_by_the_configured_estimator(estimator: KlEstimator, of_token: float):
    # 1.5 trained tokens a rollout: 10 % above the target, of which a tenth goes into the coefficient.
    controller = AdaptiveKl(0.1, target=1.5 * of_token / 1.1)
    advantages = PpoAdvantages(1.0, 1.0, False, KlPenalty(estimator, controller))
    for rows, masks, metrics, after in on_one_and_two_ranks(advantages, [1.0, NAN, 4.0]):
        assert masks == MASKS
        assert metrics["policy/kl_reference"] == pytest.approx(of_token) and metrics["policy/kl_coef"] == 0.1
        assert rows[0] == pytest.approx([1.0 - 0.1 * of_token])
        assert rows[2] == pytest.approx([4.0 - 0.2 * of_token, 4.0 - 0.1 * of_token])
        assert after.penalty.controller.coef == pytest.approx(0.101)


def test_nothing_scored_trains_nothing_and_moves_no_coefficient():
    advantages = PpoAdvantages(1.0, 1.0, True, KlPenalty(KlEstimator.K1, AdaptiveKl(0.1, target=1.0)))
    for rows, masks, metrics, after in on_one_and_two_ranks(advantages, [NAN] * 3):
        assert not any(map(any, masks.values())) and not any(map(any, rows.values()))
        assert metrics["policy/kl_reference"] == 0.0 and after.penalty.controller.coef == 0.1
