"""Preference losses against dense numpy formulas written from the papers; gradients by complex steps."""

from itertools import product

import numpy as np
import pytest
import torch

from hybridflow.algorithms.dpo import DpoLoss, dpo
from hybridflow.algorithms.kto import kto, mismatched, reference_point
from hybridflow.algorithms.preference import (
    BradleyTerryObjective,
    Counts,
    DpoObjective,
    KtoObjective,
    log_ratio_loss,
    ranking_accuracy,
    score_loss,
)
from hybridflow.algorithms.reward_model import bradley_terry
from hybridflow.micro_batch import TokenColumns
from hybridflow.target_rows import TargetRows

TOLERANCE = dict(rtol=1e-9, atol=1e-9)
PAIRS = [np.array([0.3, -1.2, 4.0, 0.0, 25.0]), np.array([-0.7, 2.0, 4.0, 0.0, -30.0])]


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def derivative(formula, numbers, place):
    """d sum(formula) / d numbers[place] by a complex step, which has no difference to lose digits in."""
    moved = [array.astype(complex) for array in numbers]
    grads = []
    for i in range(len(moved[place])):
        moved[place][i] += 1e-30j
        grads.append(formula(*moved).sum().imag / 1e-30)
        moved[place][i] -= 1e-30j
    return np.array(grads)


def compare(loss, formula, numbers):
    tensors = [torch.tensor(array, requires_grad=True) for array in numbers]
    found = loss(*tensors)
    np.testing.assert_allclose(found.detach().numpy(), formula(*numbers), **TOLERANCE)
    found.sum().backward()
    for place, tensor in enumerate(tensors):
        np.testing.assert_allclose(tensor.grad.numpy(), derivative(formula, numbers, place), **TOLERANCE)


@pytest.mark.parametrize(("margin", "centre"), [(None, 0.0), ([0.5, 0.0, -1.0, 2.0, 1.0], 0.0), (None, 0.3),
                                                ([0.5, 0.0, -1.0, 2.0, 1.0], 0.01)])
def test_bradley_terry(margin, centre):
    shift = np.zeros(5) if margin is None else np.array(margin)
    compare(lambda c, r: bradley_terry(c, r, None if margin is None else torch.tensor(shift), centre),
            lambda c, r: -np.log(sigmoid(c - r - shift)) + centre * (c + r) ** 2, PAIRS)


@pytest.mark.parametrize(("beta", "smoothing"), [*product((0.1, 2.0), (0.0, 0.2))])
def test_dpo(beta, smoothing):
    compare(lambda c, r: dpo(c, r, beta, DpoLoss.SIGMOID, smoothing),
            lambda c, r: -(1 - smoothing) * np.log(sigmoid(beta * (c - r)))
            - smoothing * np.log(sigmoid(-beta * (c - r))), [np.clip(one, -5, 5) for one in PAIRS])


def test_ipo():
    compare(lambda c, r: dpo(c, r, 0.25, DpoLoss.IPO), lambda c, r: (c - r - 2.0) ** 2, PAIRS)


@pytest.mark.parametrize(("beta", "good", "bad", "z0"), [(0.1, 1.0, 1.0, 0.0), (0.5, 1.33, 0.7, 1.25)])
def test_kto(beta, good, bad, z0):
    labels = np.array([True, False, False, True, False])

    def formula(r):
        value = np.where(labels, good * sigmoid(beta * (r - z0)), bad * sigmoid(beta * (z0 - r)))
        return np.where(labels, good, bad) - value
    compare(lambda r: kto(r, torch.tensor(labels), torch.tensor(z0, dtype=torch.float64), beta, good, bad), formula,
            PAIRS[:1])


def test_losses_of_extreme_numbers_are_finite_with_finite_gradients():
    far = torch.tensor([1e4, -1e4, 0.0], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(3, dtype=torch.float64)
    (bradley_terry(far, zero).sum() + dpo(far, zero, 1.0, label_smoothing=0.1).sum()
     + kto(far, torch.tensor([True, False, True]), zero[0], 1.0).sum()).backward()
    assert far.grad.isfinite().all()
    assert bradley_terry(zero, zero).tolist() == pytest.approx([np.log(2)] * 3)


def test_the_reference_point_is_a_mean_not_below_0_without_gradient():
    policy = torch.tensor([-1.0, -3.0], requires_grad=True)
    assert reference_point(policy, torch.tensor([-2.0, -3.0])).item() == 0.5
    below = reference_point(policy, torch.tensor([0.0, 0.0]))
    assert below.item() == 0.0 and not below.requires_grad


@pytest.mark.parametrize(("prompts", "others"), [("aabc", (2, 2, 3, 0)), ("ab", (1, 0)), ("aaa", (1, 2, 0)),
                                                 ("a", (0,)), ("", ()), ("abba", (1, 3, 3, 1))])
def test_rows_are_paired_with_the_answer_to_another_prompt(prompts, others):
    assert mismatched(prompts) == others


def test_ranking_accuracy_is_that_of_all_couples():
    draw = np.random.default_rng(0)
    good, bad = draw.integers(0, 5, 17).astype(float), draw.integers(-1, 4, 9).astype(float)
    couples = [(g > b) + 0.5 * (g == b) for g in good for b in bad]
    assert ranking_accuracy(torch.tensor(good), torch.tensor(bad)) == pytest.approx(np.mean(couples))
    assert ranking_accuracy(torch.tensor(good), torch.tensor([])) is None


# --- objectives: whatever the micro-batches, sums add up to the dense formula of the whole batch ----------------------

LENGTHS = [2, 5, 1, 1, 3, 4, 6, 2]


def ragged(seed=0):
    draw = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(sum(LENGTHS), generator=draw, dtype=torch.float64)
    reference = -torch.rand(len(LENGTHS), generator=draw, dtype=torch.float64) * 3
    return log_probs, reference, torch.tensor([1, 0, 0, 1, 1, 0, 0, 0], dtype=torch.float64)


def in_cuts(loss, log_probs, reference, labels, weight, cuts):
    """Loss, gradient and sums of micro-batches of these numbers of rows, added up; an empty one among them."""
    x, total, totals = log_probs.clone().requires_grad_(), 0.0, {}
    starts = [0, *np.cumsum(LENGTHS)]
    first = 0
    for size in cuts:
        lengths, tokens = LENGTHS[first:first + size], slice(starts[first], starts[first + size])
        rows = TargetRows.of(lengths)
        columns = TokenColumns(weight=weight[tokens], row_reference=rows.to_targets(reference[first:first + size]),
                               row_label=rows.to_targets(labels[first:first + size]))
        term, sums = loss(x[tokens], columns, rows)
        total = total + term
        totals = {name: totals.get(name, 0.0) + value.item() for name, value in sums.items()}
        first += size
    total.backward()
    return total.item(), x.grad, totals


def row_sums(log_probs):
    return np.array([part.sum().item() for part in log_probs.split(LENGTHS)])


@pytest.mark.parametrize("cuts", [(8,), (2, 2, 2, 2), (6, 0, 2), (0, 4, 4)])
def test_pairs_add_up_to_the_dense_formula(cuts):
    log_probs, reference, labels = ragged()
    ratios = row_sums(log_probs) - reference.numpy()
    chosen, rejected = ratios[::2], ratios[1::2]
    is_chosen = np.repeat(np.arange(8) % 2 == 0, LENGTHS)
    weight = torch.tensor(is_chosen / is_chosen.sum())
    nll = -(weight.numpy() * log_probs.numpy()).sum()
    found, grad, sums = in_cuts(
        lambda *x: log_ratio_loss(DpoObjective(0.4, label_smoothing=0.1), Counts(4), 0.5, *x), log_probs, reference,
        labels, weight, cuts)
    smooth = -0.9 * np.log(sigmoid(0.4 * (chosen - rejected))) - 0.1 * np.log(sigmoid(-0.4 * (chosen - rejected)))
    np.testing.assert_allclose(found, smooth.mean() + 0.5 * nll, **TOLERANCE)
    slope = 0.4 * (-0.9 * sigmoid(-0.4 * (chosen - rejected)) + 0.1 * sigmoid(0.4 * (chosen - rejected))) / 4
    per_row = np.stack([slope, -slope], 1).ravel()
    np.testing.assert_allclose(grad, np.repeat(per_row, LENGTHS) - 0.5 * weight.numpy(), **TOLERANCE)
    expected = {"loss": found, "nll": nll, "accuracy": (chosen > rejected).mean(), "chosen_reward": 0.4 * chosen.mean(),
                "margin": 0.4 * (chosen - rejected).mean(), "rejected_reward": 0.4 * rejected.mean()}
    assert sums == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("cuts", [(8,), (1,) * 8, (3, 0, 5)])
def test_answers_add_up_to_the_dense_formula(cuts):
    log_probs, reference, labels = ragged(1)
    ratios, good = row_sums(log_probs) - reference.numpy(), labels.numpy() > 0
    objective = KtoObjective(0.3, torch.tensor(0.2, dtype=torch.float64), 1.5, 0.5)
    found, grad, sums = in_cuts(lambda *x: log_ratio_loss(objective, Counts(8, 3), 0.0, *x), log_probs, reference,
                                labels, torch.zeros(sum(LENGTHS)), cuts)
    sign, weight = np.where(good, 1, -1), np.where(good, 1.5, 0.5)
    value = sigmoid(sign * 0.3 * (ratios - 0.2))
    np.testing.assert_allclose(found, (weight * (1 - value)).mean(), **TOLERANCE)
    np.testing.assert_allclose(grad, np.repeat(-weight * sign * 0.3 * value * (1 - value) / 8, LENGTHS), **TOLERANCE)
    rewards = 0.3 * ratios[good].mean(), 0.3 * ratios[~good].mean()
    assert sums == pytest.approx({"loss": found, "chosen_reward": rewards[0], "rejected_reward": rewards[1],
                                  "margin": rewards[0] - rewards[1]}, rel=1e-9)


def test_a_rank_that_has_parts_of_rows_counts_no_term_twice_and_stays_in_the_graph():
    scores = torch.tensor([1.0, 0.5], requires_grad=True)
    rows = TargetRows(torch.tensor([0, 1]), 2, counts_here=False)
    columns = TokenColumns(row_label=torch.zeros(2, dtype=torch.float64))
    loss, sums = score_loss(BradleyTerryObjective(0.1), Counts(1), scores, columns, rows)
    loss.backward()
    assert loss.item() == 0.0 and scores.grad.tolist() == [0.0, 0.0] and not any(map(bool, sums.values()))


def test_equal_rewards_are_right_by_half():
    sums = DpoObjective(0.1).of_rows(torch.zeros(6), torch.zeros(6), Counts(3))[1]
    assert sums["accuracy"].item() == 0.5 and sums["loss"].item() == pytest.approx(np.log(2))
