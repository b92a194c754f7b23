"""Advantages over ranks by hand: rows whose reward failed are in no mean, and the KL is charged and reported."""

import math
from copy import deepcopy

import pytest
import torch

from hybridflow.algorithms.advantages import AdvantageOptions
from hybridflow.algorithms.dr_grpo import dr_grpo_advantages
from hybridflow.algorithms.kl import AdaptiveKl, FixedKl, KlEstimator
from hybridflow.algorithms.ppo import gae_advantages
from hybridflow.algorithms.reinforce_pp import reinforce_pp_advantages
from hybridflow.algorithms.remax import remax_advantages
from hybridflow.algorithms.rloo import rloo_advantages
from hybridflow.algorithms.safe_rlhf import safe_rlhf_advantages
from hybridflow.batch import Batch
from hybridflow.crew import Crew
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.parallel.world import World
from hybridflow.trainer.advantage import Advantages, Costs, KlPenalty, SoftOverlong
from tests.ranks import run_ranks

LENGTHS = (1, 3, 2)
NAN = float("nan")
GAE = AdvantageOptions(gamma=1.0, lam=1.0)


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


def estimate(world: World, advantages: Advantages, scores: list[float]) -> tuple:
    batch, metrics = advantages(batch_of(world, scores), Crew.whole(world))
    columns = batch.columns
    return by_row(world, batch, columns.advantages), by_row(world, batch, columns.loss_mask), metrics, advantages


def on_one_and_two_ranks(advantages: Advantages, scores: list[float]) -> list[tuple]:
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
    for rows, masks, metrics, _ in on_one_and_two_ranks(Advantages(gae_advantages, GAE, True), [1.0, NAN, 4.0]):
        # Of the three trained tokens one has advantage 1 and two have 4: mean 3, variance 2.
        assert masks == MASKS
        assert metrics == pytest.approx({"advantage/mean": 3.0, "advantage/std": 2**0.5})
        assert rows[0] == pytest.approx([-(2**0.5)]) and rows[2] == pytest.approx([0.5**0.5] * 2)
        assert rows[1] == [0.0] * 3


def test_a_failed_reward_is_not_in_its_group():
    for rows, masks, _, _ in on_one_and_two_ranks(Advantages(dr_grpo_advantages), [1.0, NAN, 4.0]):
        assert masks == MASKS
        assert rows == {0: [-1.5], 1: [0.0] * 3, 2: [1.5] * 2}


@pytest.mark.parametrize("estimator, of_token", [
    (KlEstimator.K1, math.log(2)), (KlEstimator.K2, math.log(2) ** 2 / 2), (KlEstimator.K3, math.log(2) - 0.5),
])
def test_the_kl_is_charged_and_reported_by_the_configured_estimator(estimator: KlEstimator, of_token: float):
    # 1.5 trained tokens a rollout: 10 % above the target, of which a tenth goes into the coefficient.
    controller = AdaptiveKl(0.1, target=1.5 * of_token / 1.1)
    advantages = Advantages(gae_advantages, GAE, False, KlPenalty(estimator, controller))
    for rows, masks, metrics, after in on_one_and_two_ranks(advantages, [1.0, NAN, 4.0]):
        assert masks == MASKS
        assert metrics["policy/kl_reference"] == pytest.approx(of_token) and metrics["policy/kl_coef"] == 0.1
        assert rows[0] == pytest.approx([1.0 - 0.1 * of_token])
        assert rows[2] == pytest.approx([4.0 - 0.2 * of_token, 4.0 - 0.1 * of_token])
        assert after.penalty.controller.coef == pytest.approx(0.101)


def test_nothing_scored_trains_nothing_and_moves_no_coefficient():
    advantages = Advantages(gae_advantages, GAE, True, KlPenalty(KlEstimator.K1, AdaptiveKl(0.1, target=1.0)))
    for rows, masks, metrics, after in on_one_and_two_ranks(advantages, [NAN] * 3):
        assert not any(map(any, masks.values())) and not any(map(any, rows.values()))
        assert metrics["policy/kl_reference"] == 0.0 and after.penalty.controller.coef == 0.1


def test_the_kl_of_a_row_comes_off_its_reward():
    # Every token costs 0.1 log 2; rows have 1, 3 and 2 tokens.
    advantages = Advantages(rloo_advantages, penalty=KlPenalty(KlEstimator.K1, FixedKl(0.1)))
    token = 0.1 * math.log(2)
    for rows, masks, metrics, _ in on_one_and_two_ranks(advantages, [1.0, NAN, 4.0]):
        assert masks == MASKS and metrics["policy/kl_reference"] == pytest.approx(math.log(2))
        assert rows[0] == pytest.approx([(1.0 - token) - (4.0 - 2 * token)])
        assert rows[2] == pytest.approx([(4.0 - 2 * token) - (1.0 - token)] * 2) and rows[1] == [0.0] * 3


def test_long_responses_lose_reward():
    advantages = Advantages(reinforce_pp_advantages, overlong=SoftOverlong(max_length=3, buffer=2))
    for rows, _, metrics, _ in on_one_and_two_ranks(advantages, [1.0, 5.0, 4.0]):
        assert rows == {0: [1.0], 1: [4.0] * 3, 2: [3.5] * 2}
        assert metrics["reward/overlong_mean"] == pytest.approx(-0.5)


def masked_greedily(world: World) -> tuple:
    """ReMax with a greedy answer whose reward failed, and a token that the policy did not sample."""
    batch = batch_of(world, [1.0, 2.0, 4.0])
    tokens = torch.tensor([float(row != 2 or place != 0) for row in batch.home[world.rank]
                           for place in range(LENGTHS[row])])
    batch, metrics = Advantages(remax_advantages)(batch.with_columns(loss_mask=tokens), Crew.whole(world),
                                                  torch.tensor([0.5, NAN, 1.0], dtype=torch.float64))
    return by_row(world, batch, batch.columns.advantages), by_row(world, batch, batch.columns.loss_mask), \
        batch.is_trained, metrics


def test_baselines_and_tokens_that_are_not_trained():
    for ranks in ([masked_greedily(World.single(torch.device("cpu")))], run_ranks(2, masked_greedily)):
        rows = {row: values for found, *_ in ranks for row, values in found.items()}
        masks = {row: values for _, found, *_ in ranks for row, values in found.items()}
        assert rows == {0: [0.5], 1: [0.0] * 3, 2: [0.0, 3.0]} and masks == {0: [1.0], 1: [0.0] * 3, 2: [0.0, 1.0]}
        assert all(trained == (True, False, True) for *_, trained, _ in ranks)  # and so it is in no count of an update
        assert ranks[0][3]["advantage/mean"] == pytest.approx(1.75)


def bounded(world: World) -> tuple:
    """Safe RLHF: rows cost 2, 0 and nothing that is known."""
    batch = batch_of(world, [1.0, 3.0, 4.0])
    costs = Costs(torch.tensor([2.0, 0.0, NAN], dtype=torch.float64), torch.ones_like(batch.columns.old_values), 3.0)
    advantages = Advantages(safe_rlhf_advantages, GAE, penalty=KlPenalty(KlEstimator.K1, FixedKl(0.1)))
    ours, cost, metrics = advantages.with_costs(batch, Crew.whole(world), costs)
    columns = (ours.columns.advantages, ours.columns.returns, cost.columns.returns, cost.columns.old_values)
    return *(by_row(world, batch, column) for column in columns), metrics


def test_costs_are_weighed_against_rewards():
    half = 0.05 * math.log(2)
    for ranks in ([bounded(World.single(torch.device("cpu")))], run_ranks(2, bounded)):
        advantages, returns, cost_returns, values = (
            {row: told for found in ranks for row, told in found[place].items()} for place in range(4))
        # gamma and lambda 1: a return is all that is to come, of the reward less half a penalty a token, of the cost
        # more half of one; the critic says 0, the cost critic 1.
        assert returns[0] == pytest.approx([1.0 - half]) and cost_returns[0] == pytest.approx([2.0 + half])
        assert returns[1] == pytest.approx([3.0 - left * half for left in (3, 2, 1)])
        assert cost_returns[1] == pytest.approx([left * half for left in (3, 2, 1)])
        assert advantages[0] == pytest.approx([(1.0 - half - 3.0 * (1.0 + half)) / 4.0])
        assert advantages[2] == cost_returns[2] == [0.0] * 2 and values[1] == [1.0] * 3
