"""Reductions against the dense formula, and the public cases 1-5 and 7 (the numbers of cases 1-3 are fixed there)."""

import numpy as np
import pytest
import torch

from hybridflow.algorithms.kl import KlEstimator
from hybridflow.algorithms.losses import Clip, finish_metrics, supervised_loss
from hybridflow.algorithms.objectives import ActorObjective, CriticObjective
from hybridflow.algorithms.reduction import GlobalCounts, LossReduction, loss_weights
from hybridflow.micro_batch import TokenColumns
from hybridflow.target_rows import TargetRows
from tests.algorithms import dense

L = 4
LENGTHS = (5, 1, 0, 3, 7, 2)
CUTS = [(6,), (1,) * 6, (2, 2, 2), (3, 3), (1, 4, 1), (5, 1), (0, 6), (2, 0, 4)]


def count(mask, lengths):
    rows = dense.rows(mask, lengths)
    return GlobalCounts(tokens=sum(int((row != 0).sum()) for row in rows), sequences=sum(row.any() for row in rows))


def weights(reduction, mask, lengths, counts=None):
    length = L if reduction is LossReduction.CONSTANT_LENGTH else None
    counts = counts or count(mask, lengths)
    return loss_weights(reduction, mask, lengths, counts, constant_length=length, dtype=torch.float64)


def randn(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def row_cuts(cut):
    """[(token slice, lengths)] of consecutive groups of rows."""
    pieces, row, token = [], 0, 0
    for n in cut:
        lengths = LENGTHS[row : row + n]
        pieces.append((slice(token, token + sum(lengths)), lengths))
        row, token = row + n, token + sum(lengths)
    return pieces


def masks():
    some = (randn(sum(LENGTHS), 1) > -0.3).double()
    some[6:9] = 0  # a fully masked row
    return {"all": torch.ones(sum(LENGTHS)), "some": some, "none": torch.zeros(sum(LENGTHS)), "bool": some.bool()}


@pytest.mark.parametrize("mask_name", ["all", "some", "none", "bool"])
@pytest.mark.parametrize("reduction", LossReduction)
def test_weights_equal_the_dense_reduction(reduction, mask_name):
    mask, losses = masks()[mask_name], randn(sum(LENGTHS), 2)
    expected = dense.reduce(dense.rows(losses, LENGTHS), dense.rows(mask, LENGTHS), reduction.value, L)
    assert (weights(reduction, mask, LENGTHS) * losses).sum().item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("reduction", LossReduction)
def test_weights_of_parts_under_the_global_counts_make_the_whole(reduction):
    mask = masks()["some"]
    whole, counts = weights(reduction, mask, LENGTHS), count(mask, LENGTHS)
    for cut in CUTS:  # each part as if on a rank of its own
        parts = [weights(reduction, mask[tokens], lengths, counts) for tokens, lengths in row_cuts(cut)]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)


def gradients(objective, features, columns, cut, extra=()):
    """Loss, gradient and summed metrics of a linear model whose batch is run in micro-batches of `cut` rows."""
    model = torch.linspace(-1, 1, features.shape[1], dtype=torch.float64).requires_grad_()
    total, metrics = 0.0, {}
    for tokens, _ in row_cuts(cut):
        loss, sums = objective(features[tokens] @ model, *extra, columns.select(torch.arange(len(features))[tokens]))
        loss.backward()
        total += loss.item()
        metrics = {name: metrics.get(name, 0.0) + value for name, value in sums.items()}
    return total, model.grad, finish_metrics(metrics)


@pytest.mark.parametrize("reduction", LossReduction)
@pytest.mark.parametrize("which", ["actor", "critic", "supervised"])
def test_no_cut_changes_loss_gradient_or_metrics(which, reduction):
    n = sum(LENGTHS)
    features = randn(n * 3, 3).view(n, 3)
    columns = TokenColumns(
        weight=weights(reduction, masks()["some"], LENGTHS), old_log_probs=randn(n, 4), ref_log_probs=randn(n, 5),
        advantages=randn(n, 6), returns=randn(n, 7), old_values=randn(n, 8), rollout_log_probs=randn(n, 9),
    )  # fmt: skip
    objective, extra = {
        "actor": (lambda out, columns: ActorObjective(Clip(0.2, 0.3, 1.5), 0.0, KlEstimator.K3, 0.1)(
            out, None, columns, TargetRows.of([len(out)])), ()),
        "critic": (CriticObjective(0.2, 0.5), ()),
        "supervised": (supervised_loss, ()),
    }[which]
    loss, gradient, metrics = gradients(objective, features, columns, (len(LENGTHS),), extra)
    assert gradient.abs().min() > 0
    for cut in CUTS:
        other_loss, other_gradient, other_metrics = gradients(objective, features, columns, cut, extra)
        assert other_loss == pytest.approx(loss, abs=1e-9)
        torch.testing.assert_close(other_gradient, gradient, rtol=0, atol=1e-9)
        assert other_metrics == pytest.approx(metrics, abs=1e-9)


def test_case_1_token_mean_and_sequence_mean_by_hand():
    lengths, mask = (1, 3, 2, 6), torch.ones(12)
    losses = torch.repeat_interleave(torch.tensor([4.0, 1.0, 2.0, 0.5], dtype=torch.float64), torch.tensor(lengths))
    by_tokens, by_rows = (
        weights(reduction, mask, lengths) * losses
        for reduction in (LossReduction.TOKEN_MEAN, LossReduction.SEQ_MEAN_TOKEN_MEAN)
    )
    for cut in [(12,), (4, 8), (1, 11), (1, 3, 2, 6), (6, 6)]:
        assert sum(part.sum().item() for part in by_tokens.split(cut)) == pytest.approx(1.166667, abs=1e-6)
        assert sum(part.sum().item() for part in by_rows.split(cut)) == pytest.approx(1.875, abs=1e-6)


def test_case_1_one_token_beside_nine():
    losses, lengths = torch.tensor([1.0] + [0.0] * 9, dtype=torch.float64), (1, 9)
    on_a_rank_each = [
        weights(LossReduction.TOKEN_MEAN, torch.ones(n), (n,), GlobalCounts(10, 2)) for n in lengths
    ]  # fmt: skip
    whole = weights(LossReduction.TOKEN_MEAN, torch.ones(10), lengths)
    assert (whole * losses).sum().item() == pytest.approx(0.1, abs=1e-9)
    assert (torch.cat(on_a_rank_each) * losses).sum().item() == pytest.approx(0.1, abs=1e-9)


def test_case_2_critic_with_constant_error_does_not_scale_with_micro_batches():
    returns = torch.ones(8, dtype=torch.float64)
    columns = TokenColumns(weight=weights(LossReduction.TOKEN_MEAN, torch.ones(8), (2,) * 4), returns=returns)
    for pieces in (1, 2, 4):
        value = torch.zeros((), dtype=torch.float64, requires_grad=True)
        total = 0.0
        for index in torch.arange(8).chunk(pieces):
            loss, _ = CriticObjective(value_clip=None)(value.expand(len(index)), columns.select(index))
            loss.backward()
            total += loss.item()
        assert total == pytest.approx(0.5, abs=1e-9)
        assert value.grad.item() == pytest.approx(-1.0, abs=1e-9)


def test_case_3_constant_length_does_not_scale_with_ranks():
    one_rank = weights(LossReduction.CONSTANT_LENGTH, torch.ones(8), (4, 4))
    two_ranks = [weights(LossReduction.CONSTANT_LENGTH, torch.ones(4), (4,), GlobalCounts(8, 2))] * 2
    assert one_rank.sum().item() == pytest.approx(1.0, abs=1e-9)
    assert sum(w.sum().item() for w in two_ranks) == pytest.approx(1.0, abs=1e-9)


def test_case_4_a_pick_of_tokens_over_the_batch_lives_in_the_weights():
    n = sum(LENGTHS)
    entropy, losses = randn(n, 1), randn(n, 2)
    mask = torch.zeros(n)
    mask[entropy.topk(4).indices] = 1.0  # picked over the whole optimizer batch, before any cut
    weight = weights(LossReduction.TOKEN_MEAN, mask, LENGTHS)
    for cut in CUTS:
        picked = torch.cat([weight[tokens] for tokens, _ in row_cuts(cut)]).nonzero().squeeze(1)
        assert picked.tolist() == sorted(entropy.topk(4).indices.tolist())
    assert (weight * losses).sum().item() == pytest.approx(losses[mask != 0].mean().item(), abs=1e-9)


def test_case_5_sgd_steps_are_equal_for_every_cut():
    n = sum(LENGTHS)
    features = randn(n * 3, 3).view(n, 3)
    columns = TokenColumns(weight=weights(LossReduction.TOKEN_MEAN, torch.ones(n), LENGTHS))
    model = torch.zeros(3, dtype=torch.float64)
    steps = [model - 0.1 * gradients(supervised_loss, features, columns, cut)[1] for cut in CUTS]
    dense_gradient = -features.mean(0)
    for step in steps:
        np.testing.assert_allclose(step.numpy(), (-0.1 * dense_gradient).numpy(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("reduction", LossReduction)
def test_case_7_nothing_trained_is_zero_with_a_live_graph(reduction):
    for lengths in (LENGTHS, (0, 0), ()):
        n = sum(lengths)
        columns = TokenColumns(
            weight=weights(reduction, torch.zeros(n), lengths), advantages=randn(n, 1), returns=randn(n, 2),
            old_log_probs=randn(n, 3), old_values=randn(n, 4), ref_log_probs=randn(n, 5),
        )  # fmt: skip
        actor = ActorObjective(Clip(dual=3.0), 0.1, KlEstimator.K3, 0.1)
        output = randn(n, 6).requires_grad_()
        results = [
            actor(output, output.square(), columns, TargetRows.of(lengths)), CriticObjective(0.2)(output, columns),
            supervised_loss(output, columns),
        ]  # fmt: skip
        for loss, sums in results:
            output.grad = None
            loss.backward()
            assert loss.item() == 0.0 and (output.grad == 0).all()
            assert not any(finish_metrics(sums).values())


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="constant_length is None"):
        loss_weights(LossReduction.CONSTANT_LENGTH, torch.ones(2), (2,), GlobalCounts(2, 1))
    with pytest.raises(ValueError, match="constant_length is 4 with loss reduction token-mean"):
        loss_weights(LossReduction.TOKEN_MEAN, torch.ones(2), (2,), GlobalCounts(2, 1), constant_length=4)
    with pytest.raises(ValueError, match="must be positive"):
        loss_weights(LossReduction.CONSTANT_LENGTH, torch.ones(2), (2,), GlobalCounts(2, 1), constant_length=0)
    with pytest.raises(ValueError, match="mask has shape"):
        loss_weights(LossReduction.TOKEN_MEAN, torch.ones(3), (2,), GlobalCounts(2, 1))
