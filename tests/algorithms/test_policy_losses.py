"""Every policy loss of the table against loops over rows, its gradient against differences of them, and both the same
for every cut into micro-batches and context parts; the importance correction of each.
"""

import inspect

import numpy as np
import pytest
import torch

from hybridflow.algorithms.correction import Bounding, Correction, RatioOf
from hybridflow.algorithms.functions import find_policy_loss
from hybridflow.algorithms.losses import Clip, finish_metrics
from hybridflow.algorithms.objectives import ActorObjective
from hybridflow.algorithms.reduction import GlobalCounts, LossReduction, loss_weights
from hybridflow.algorithms.registry import POLICY_LOSSES
from hybridflow.micro_batch import TokenColumns
from hybridflow.target_rows import TargetRows
from tests.algorithms import dense

LENGTHS = (5, 0, 1, 63, 4, 3)
UNTRAINED = (0, 3, 20, 21, 68, 69, 70, 71, 72)  # within rows 0 and 3, and the whole of rows 4
CLIPS = {"ppo": Clip(0.2, 0.28, dual=1.35), "reinforce": Clip(), "gspo": Clip(0.02, 0.03),
         "gspo_token": Clip(0.02, 0.03), "cispo": Clip(1.0, 0.2)}
CORRECTIONS = [Correction(level, how, 0.7, 1.3) for level in RatioOf for how in Bounding]


def randn(seed, scale=1.0):
    return scale * torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mask():
    kept = torch.ones(sum(LENGTHS), dtype=torch.float64)
    kept[list(UNTRAINED)] = 0.0
    return kept


def columns_of(reduction=LossReduction.SEQ_MEAN_TOKEN_MEAN, **more):
    counts = GlobalCounts(tokens=int(mask().sum()), sequences=4)
    weight = loss_weights(reduction, mask(), LENGTHS, counts, dtype=torch.float64)
    log_probs = randn(2) - 3
    # Rows whose mean log-ratios lie on both sides of GSPO's bounds; what is not trained may hold anything finite.
    shift = torch.cat([torch.full((n,), s, dtype=torch.float64) for n, s in zip(LENGTHS, (0.1, 0, -0.1, 0.01, 0, 0))])
    old = torch.where(mask() != 0, log_probs - shift + randn(3, 0.2), 300.0)
    columns = TokenColumns(weight=weight, old_log_probs=old, advantages=randn(4),
                           rollout_log_probs=torch.where(mask() != 0, old + randn(5, 0.3), -300.0))
    return log_probs, columns.with_columns(**more)


def whole_rows():
    return TargetRows.of(LENGTHS)


def trained_rows(*tensors):
    """Of each row, its trained tokens of each tensor."""
    masks = dense.rows(mask(), LENGTHS)
    return list(zip(*([part[m != 0] for part, m in zip(dense.rows(x.detach(), LENGTHS), masks)] for x in tensors)))


def dense_loss(name, log_probs, columns, clip, advantages=None):
    """As a function of log_probs `[targets]` numpy; what the loss takes no gradient of stays where `columns` are."""
    advantages = columns.advantages if advantages is None else advantages
    total = 0.0
    tensors = (torch.as_tensor(log_probs), columns.weight, columns.old_log_probs, advantages, columns_of()[0])
    for x, w, old, a, start in trained_rows(*tensors):
        if name == "cispo":
            weights = np.clip(np.exp(start - old), 1 - clip.low, 1 + clip.high)
            losses = -weights * a * x
        elif name == "gspo_token":
            ratio = np.exp(np.mean(start - old)) if len(x) else 1.0
            losses = np.array([dense.policy_token_loss(np.log(ratio * np.exp(p - s)), 0.0, b, clip.low, clip.high)
                               for p, s, b in zip(x, start, a)])
        else:
            losses = dense.policy_row_losses(name, x, old, a, clip.low, clip.high, clip.dual)
        total += float(np.sum(w * losses))
    return total


def gradient_by_differences(f, x, step=1e-6):
    result = np.zeros_like(x)
    for i in range(len(x)):
        for sign in (1, -1):
            moved = x.copy()
            moved[i] += sign * step
            result[i] += sign * f(moved) / (2 * step)
    return result


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_equals_the_dense_formula(name):
    start, columns = columns_of()
    log_probs, clip = start.clone().requires_grad_(), CLIPS[name]
    loss, sums = find_policy_loss(name)(log_probs, columns, whole_rows(), clip)
    loss.backward()
    assert loss.item() == pytest.approx(dense_loss(name, start.numpy(), columns, clip), abs=1e-9)
    expected = gradient_by_differences(lambda x: dense_loss(name, x, columns, clip), start.numpy())
    np.testing.assert_allclose(log_probs.grad.numpy(), expected, rtol=0, atol=1e-7)
    assert not log_probs.grad[list(UNTRAINED)].any()
    metrics = finish_metrics(sums)
    assert metrics["policy_loss"] == pytest.approx(loss.item(), abs=1e-12)
    rows = trained_rows(start, columns.old_log_probs, columns.rollout_log_probs, columns.weight, columns.advantages)
    weight = np.concatenate([w for *_, w, _ in rows])
    gap = np.concatenate([np.abs(old - rollout) for _, old, rollout, *_ in rows])
    assert metrics["rollout_gap"] == pytest.approx(np.average(gap, weights=weight), abs=1e-9)
    if name == "reinforce":
        assert "clip_fraction" not in metrics and "ratio" not in metrics
        return
    of_rows = name.startswith("gspo")
    ratio = np.concatenate([np.full(len(x), np.exp(np.mean(x - old))) if of_rows and len(x) else np.exp(x - old)
                            for x, old, *_ in rows])
    advantages = np.concatenate([a for *_, a in rows])
    high, low = ratio > 1 + clip.high, ratio < 1 - clip.low
    out = high | low if name == "cispo" else (high & (advantages > 0)) | (low & (advantages < 0))
    assert metrics["ratio"] == pytest.approx(np.average(ratio, weights=weight), abs=1e-9)
    assert metrics["clip_fraction"] == pytest.approx(np.average(out, weights=weight), abs=1e-9) and out.any()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_without_old_log_probs_the_gradient_is_that_of_the_policy(name):
    start, columns = columns_of(advantages=whole_rows().to_targets(torch.arange(6.0, dtype=torch.float64) - 2))
    log_probs = start.clone().requires_grad_()
    without = TokenColumns(columns.weight, advantages=columns.advantages)
    loss, sums = find_policy_loss(name)(log_probs, without, whole_rows(), CLIPS[name])
    loss.backward()
    torch.testing.assert_close(log_probs.grad, -columns.weight * columns.advantages)
    metrics = finish_metrics(sums)
    assert metrics["approx_kl"] == 0.0 and metrics.get("ratio", 1.0) == pytest.approx(1.0, abs=1e-15)
    assert metrics.get("clip_fraction", 0.0) == 0.0 and "rollout_gap" not in metrics


def test_gspo_and_gspo_token_agree_where_a_rows_advantages_do():
    start, columns = columns_of(advantages=whole_rows().to_targets(torch.tensor([1.0, 0, -2, 3, 5, -1]).double()))
    gradients = []
    for name in ("gspo", "gspo_token"):
        log_probs = start.clone().requires_grad_()
        find_policy_loss(name)(log_probs, columns, whole_rows(), Clip(0.5, 0.5))[0].backward()
        gradients.append(log_probs.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_degenerate_rows(name):
    """No target at all, one token, nothing trained: finite, 0 where nothing is trained, and a live graph."""
    for lengths, weights in (((), []), ((0, 0), []), ((1,), [0.5]), ((2, 1), [0.0, 0.0, 0.0])):
        count = sum(lengths)
        log_probs = torch.full((count,), -1.0, dtype=torch.float64, requires_grad=True)
        columns = TokenColumns(torch.tensor(weights, dtype=torch.float64), advantages=torch.ones(count),
                               old_log_probs=torch.full((count,), -1.5), rollout_log_probs=torch.full((count,), -9.0))
        loss, sums = ActorObjective(Clip(), policy_loss=find_policy_loss(name), correction=CORRECTIONS[-1])(
            log_probs, None, columns, TargetRows.of(lengths))
        loss.backward()
        assert loss.isfinite() and log_probs.grad.isfinite().all()
        assert all(np.isfinite(value) for value in finish_metrics(sums).values())
        if not any(weights):
            assert loss == 0 and not log_probs.grad.any()


@pytest.mark.parametrize("correction", [None, *CORRECTIONS], ids=str)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_no_cut_shows(name, correction):
    """Micro-batches are added up; context parts of a row give their sums to each other."""
    start, columns = columns_of()
    objective = ActorObjective(CLIPS[name], policy_loss=find_policy_loss(name), correction=correction)
    alone = start.clone().requires_grad_()
    loss, sums = objective(alone, None, columns, whole_rows())
    loss.backward()
    for cut in (in_micro_batches, in_context_parts):
        log_probs = start.clone().requires_grad_()
        parts = cut(objective, log_probs, columns)
        sum(one for one, _ in parts).backward()
        torch.testing.assert_close(log_probs.grad, alone.grad, rtol=0, atol=1e-12)
        totals = {key: sum(more[key].item() for _, more in parts) for key in sums}
        assert finish_metrics(totals) == pytest.approx(finish_metrics(sums), abs=1e-9)


def in_micro_batches(objective, log_probs, columns):
    edges, parts = np.cumsum([0, *LENGTHS]), []
    for rows in ((0, 2), (2, 3), (3, 6)):
        index = torch.arange(edges[rows[0]], edges[rows[1]])
        parts.append(objective(log_probs[index], None, columns.select(index), TargetRows.of(LENGTHS[slice(*rows)])))
    return parts


def in_context_parts(objective, log_probs, columns):
    """Two ranks with every other target. Each asks for its sums in the same order, and is answered with the whole's:
    a first run finds what each has to give.
    """
    index = [torch.arange(first, sum(LENGTHS), 2) for first in (0, 1)]
    given = [[], []]
    for rank, mine in enumerate(index):
        objective(log_probs[mine], None, columns.select(mine),
                  TargetRows(whole_rows().index[mine], len(LENGTHS), lambda x, r=rank: given[r].append(x) or x))
    totals = [a + b for a, b in zip(*given, strict=True)]
    parts = []
    for rank, mine in enumerate(index):
        answers = iter(totals)
        rows = TargetRows(whole_rows().index[mine], len(LENGTHS), lambda x, answers=answers: next(answers), rank == 0)
        parts.append(objective(log_probs[mine], None, columns.select(mine), rows))
    return parts


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("name", ["ppo", "cispo"])
def test_the_correction_weighs_the_policy_term(name, correction):
    start, columns = columns_of(LossReduction.TOKEN_MEAN)
    rows = trained_rows(columns.old_log_probs, columns.rollout_log_probs)
    told = [dense.importance(*row, correction.level.value, correction.how.value, 0.7, 1.3) for row in rows]
    weights, out = np.concatenate([w for w, _ in told]), np.concatenate([o for _, o in told])
    on_targets = np.zeros(len(start))
    on_targets[mask().numpy() != 0] = weights
    log_probs, clip = start.clone().requires_grad_(), CLIPS[name]
    objective = ActorObjective(clip, policy_loss=find_policy_loss(name), correction=correction)
    loss, sums = objective(log_probs, None, columns, whole_rows())
    loss.backward()
    scaled = columns.advantages * torch.as_tensor(on_targets)
    assert loss.item() == pytest.approx(dense_loss(name, start.numpy(), columns, clip, scaled), abs=1e-9)
    expected = gradient_by_differences(lambda x: dense_loss(name, x, columns, clip, scaled), start.numpy())
    np.testing.assert_allclose(log_probs.grad.numpy(), expected, rtol=0, atol=1e-7)
    metrics = finish_metrics(sums)
    assert metrics["correction_weight"] == pytest.approx(weights.mean(), abs=1e-9)
    assert metrics["correction_fraction"] == pytest.approx(out.mean(), abs=1e-9) and 0 < out.mean() < 1
    kept = [w[0] for w, _ in told if len(w)] if correction.level is RatioOf.SEQUENCE else weights
    ess = np.sum(kept) ** 2 / (len(kept) * np.sum(np.square(kept)))
    assert metrics["correction_ess"] == pytest.approx(ess, abs=1e-9)
    # Ratio, KL and gap are not weighed.
    plain = finish_metrics(find_policy_loss(name)(start, columns, whole_rows(), clip)[1])
    for key in ("ratio", "approx_kl", "rollout_gap"):
        assert metrics[key] == pytest.approx(plain[key], abs=1e-12)


def test_the_correction_without_old_log_probs_is_that_of_the_policy_in_training():
    start, columns = columns_of()
    without = TokenColumns(columns.weight, advantages=columns.advantages, rollout_log_probs=columns.rollout_log_probs)
    correction = CORRECTIONS[0]
    weighed, _ = correction.apply(start.clone().requires_grad_(), without, whole_rows())
    same, _ = correction.apply(start, columns.with_columns(old_log_probs=start), whole_rows())
    assert torch.equal(weighed.advantages, same.advantages) and not weighed.advantages.requires_grad


def test_a_ratio_beyond_all_bounds_stays_finite():
    columns = TokenColumns(torch.ones(2), advantages=torch.ones(2), rollout_log_probs=torch.tensor([-500.0, 0.0]))
    for level in RatioOf:
        for how, expected in ((Bounding.TRUNCATE, 2.0), (Bounding.MASK, 0.0)):
            weighed, sums = Correction(level, how).apply(torch.tensor([-1.0, -500.0]), columns, TargetRows.of([1, 1]))
            assert weighed.advantages[0] == expected and weighed.advantages[1] < 1e-8
            assert np.isfinite(finish_metrics(sums | {"weight": torch.tensor(2.0)})["correction_ess"])


def test_bad_bounds_and_missing_columns_are_named():
    for low, high in ((-0.1, 2), (1.1, 2), (0.5, 0.9), (0.5, float("nan"))):
        with pytest.raises(ValueError, match="bounds must lie in"):
            Correction(RatioOf.TOKEN, Bounding.MASK, low, high)
    with pytest.raises(ValueError, match="'rollout_log_probs'"):
        CORRECTIONS[0].apply(torch.zeros(1), TokenColumns(torch.ones(1), advantages=torch.ones(1)), TargetRows.of([1]))
    for name in POLICY_LOSSES:
        assert list(inspect.signature(find_policy_loss(name)).parameters) == ["log_probs", "columns", "rows", "clip"]
        with pytest.raises(ValueError, match="'advantages'"):
            find_policy_loss(name)(torch.zeros(1), TokenColumns(torch.ones(1)), TargetRows.of([1]), Clip())
