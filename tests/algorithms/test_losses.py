import numpy as np
import pytest
import torch

from hybridflow.algorithms.kl import KlEstimator
from hybridflow.algorithms.losses import Clip, entropy_bonus, finish_metrics, kl_loss, supervised_loss
from hybridflow.algorithms.losses import value_loss as value_loss_of
from hybridflow.algorithms.objectives import ActorObjective, CriticObjective
from hybridflow.algorithms.ppo import clipped_policy_loss
from hybridflow.algorithms.safe_rlhf import pretraining_loss
from hybridflow.micro_batch import TokenColumns
from hybridflow.parallel.mesh import AxisGroup
from hybridflow.parallel.vocab import token_log_probs
from hybridflow.target_rows import TargetRows
from tests.algorithms import dense

CLIPS = [Clip(0.2, 0.2), Clip(0.2, 0.28), Clip(0.1, 0.3, dual=1.5), Clip(0.0, 0.0), Clip(0.2, 0.2, dual=1.05)]
NUM = 63
ROWS = TargetRows.of([NUM])


def randn(seed, scale=1.0):
    return scale * torch.randn(NUM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights():
    return torch.where(randn(0) > -0.5, randn(1).abs(), 0.0)


def gradient_by_differences(f, x, step=1e-6):
    """Central differences of the numpy function f at x, coordinate by coordinate."""
    result = np.zeros_like(x)
    for i in range(len(x)):
        for sign in (1, -1):
            moved = x.copy()
            moved[i] += sign * step
            result[i] += sign * f(moved) / (2 * step)
    return result


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_policy_loss_equals_the_dense_formula(clip):
    log_probs = randn(2).requires_grad_()
    columns = TokenColumns(weight=weights(), old_log_probs=randn(2) + randn(3, 0.4), advantages=randn(4))
    loss, sums = clipped_policy_loss(log_probs, columns, ROWS, clip)
    loss.backward()
    w, old, adv = (x.numpy() for x in (columns.weight, columns.old_log_probs, columns.advantages))

    def dense_loss(lp):
        tokens = [
            dense.policy_token_loss(*row, clip.low, clip.high, clip.dual) for row in zip(lp, old, adv, strict=True)
        ]
        return float(np.sum(w * tokens))

    at = log_probs.detach().numpy()
    assert loss.item() == pytest.approx(dense_loss(at), abs=1e-9)
    np.testing.assert_allclose(log_probs.grad.numpy(), gradient_by_differences(dense_loss, at), rtol=0, atol=1e-7)
    ratio = np.exp(at - old)
    metrics = finish_metrics(sums)
    assert metrics["policy_loss"] == pytest.approx(dense_loss(at), abs=1e-9)
    assert metrics["ratio"] == pytest.approx(np.average(ratio, weights=w), abs=1e-9)
    assert metrics["approx_kl"] == pytest.approx(np.average(ratio - 1 - np.log(ratio), weights=w), abs=1e-9)
    active = ((ratio > 1 + clip.high) & (adv > 0)) | ((ratio < 1 - clip.low) & (adv < 0))
    assert metrics["clip_fraction"] == pytest.approx(np.average(active, weights=w), abs=1e-9)
    if clip.dual is not None:
        capped = (np.maximum(ratio, 1 - clip.low) > clip.dual) & (adv < 0)
        assert metrics["dual_clip_fraction"] == pytest.approx(np.average(capped, weights=w), abs=1e-9)


def test_without_old_log_probs_the_ratio_is_exactly_one_and_has_a_gradient():
    for dtype in (torch.float32, torch.float64):
        log_probs = randn(2).to(dtype).requires_grad_()
        columns = TokenColumns(weight=weights().to(dtype), advantages=randn(4).to(dtype))
        loss, sums = clipped_policy_loss(log_probs, columns, ROWS, Clip(0.2, 0.2, dual=3.0))
        loss.backward()
        torch.testing.assert_close(log_probs.grad, -columns.weight * columns.advantages)
        metrics = finish_metrics(sums)
        assert (metrics["clip_fraction"], metrics["dual_clip_fraction"], metrics["approx_kl"]) == (0.0, 0.0, 0.0)
        assert metrics["ratio"] == 1.0


def test_policy_loss_by_hand():
    # Ratios 1.5 and 0.5, advantages +1 and -1, clip 0.2: both clipped, at 1.2 and 0.8.
    log_probs = torch.tensor([1.5, 0.5], dtype=torch.float64).log().requires_grad_()
    columns = TokenColumns(
        weight=torch.tensor([0.5, 0.5]), old_log_probs=torch.zeros(2), advantages=torch.tensor([1.0, -1.0]),
    )  # fmt: skip
    loss, sums = clipped_policy_loss(log_probs, columns, ROWS, Clip())
    loss.backward()
    assert loss.item() == pytest.approx((-1.2 + 0.8) / 2)
    assert log_probs.grad.tolist() == [0.0, 0.0]
    assert finish_metrics(sums)["clip_fraction"] == 1.0


def test_a_token_that_is_not_trained_may_hold_any_finite_number():
    log_probs = torch.tensor([-300.0, -1.0], requires_grad=True)
    columns = TokenColumns(
        weight=torch.tensor([0.0, 1.0]), old_log_probs=torch.tensor([-1.0, -300.0]),
        advantages=torch.tensor([1.0, 1.0]), ref_log_probs=torch.tensor([-1.0, -300.0]),
    )  # fmt: skip
    loss, sums = ActorObjective(Clip(), kl_estimator=KlEstimator.K3, kl_coef=0.1)(log_probs, None, columns, ROWS)
    loss.backward()
    assert loss.isfinite() and log_probs.grad.isfinite().all() and log_probs.grad[0] == 0
    assert all(np.isfinite(v) for v in finish_metrics(sums).values())


@pytest.mark.parametrize("value_clip", [None, 0.2, 1.0])
def test_value_loss_equals_the_dense_formula(value_clip):
    values = randn(5).requires_grad_()
    columns = TokenColumns(weight=weights(), returns=randn(6) + 2, old_values=randn(5) + randn(7, 0.3))
    loss, sums = value_loss_of(values, columns, value_clip)
    loss.backward()
    w, old, target = (x.numpy() for x in (columns.weight, columns.old_values, columns.returns))

    def dense_loss(v):
        return float(np.sum(w * [dense.value_token_loss(*row, value_clip) for row in zip(v, old, target, strict=True)]))

    at = values.detach().numpy()
    assert loss.item() == pytest.approx(dense_loss(at), abs=1e-9)
    np.testing.assert_allclose(values.grad.numpy(), gradient_by_differences(dense_loss, at), rtol=0, atol=1e-7)
    metrics = finish_metrics(sums)
    mean = np.average(target - at, weights=w)
    of_residual = np.average((target - at - mean) ** 2, weights=w)
    of_target = np.average((target - np.average(target, weights=w)) ** 2, weights=w)
    assert metrics["explained_variance"] == pytest.approx(1 - of_residual / of_target, abs=1e-9)
    assert metrics["value_error"] == pytest.approx(np.average((target - at) ** 2, weights=w), abs=1e-9)
    assert metrics["value"] == pytest.approx(np.average(at, weights=w), abs=1e-9)
    assert metrics["return"] == pytest.approx(np.average(target, weights=w), abs=1e-9)
    assert "residual" not in metrics and "weight" not in metrics


def test_values_at_the_old_ones_are_not_clipped():
    old = torch.tensor([0.1, 0.2, 1e6])  # old + (v - old) is not v in floating point
    columns = TokenColumns(weight=torch.ones(3) / 3, returns=torch.zeros(3), old_values=old)
    _, sums = value_loss_of(old * 1.0000001, columns, 0.2)
    assert finish_metrics(sums)["value_clip_fraction"] == 0.0


def test_constant_returns_have_no_explained_variance():
    columns = TokenColumns(weight=torch.ones(3) / 3, returns=torch.full((3,), 0.1))
    metrics = finish_metrics(value_loss_of(torch.zeros(3), columns, None)[1])
    assert "explained_variance" not in metrics and metrics["return"] == pytest.approx(0.1)


def test_sums_may_be_numbers_and_are_divided_by_the_weight_where_they_are_averages():
    sums = {"weight": 2.0, "nll": torch.tensor(3.0), "supervised_loss": 3.0}
    assert finish_metrics(sums) == {"nll": 1.5, "supervised_loss": 3.0}


@pytest.mark.parametrize("estimator", KlEstimator)
def test_kl_entropy_and_supervised_losses(estimator):
    log_probs, reference, w = randn(8) - 3, randn(9) - 3, weights()
    columns = TokenColumns(weight=w, ref_log_probs=reference)
    loss, sums = kl_loss(log_probs, columns, estimator)
    of_tokens = dense.kl(log_probs.numpy(), reference.numpy(), estimator.value)
    assert loss.item() == pytest.approx((w.numpy() * of_tokens).sum(), abs=1e-9)
    metrics = finish_metrics(sums)
    assert metrics["kl_loss"] == pytest.approx(loss.item(), abs=1e-12)
    assert metrics["kl"] == pytest.approx(np.average(of_tokens, weights=w), abs=1e-9)
    entropy = randn(10).abs()
    assert entropy_bonus(entropy, columns)[0].item() == pytest.approx(-(w * entropy).sum().item(), abs=1e-9)
    loss, sums = supervised_loss(log_probs, columns)
    assert loss.item() == pytest.approx(-(w * log_probs).sum().item(), abs=1e-9)
    assert finish_metrics(sums)["nll"] == pytest.approx(-np.average(log_probs.numpy(), weights=w), abs=1e-9)


def test_the_actor_objective_is_the_sum_of_its_parts():
    columns = TokenColumns(
        weight=weights(), advantages=randn(4), ref_log_probs=randn(9), rollout_log_probs=randn(8) + 1
    )
    log_probs, entropy = randn(8).requires_grad_(), randn(10).abs()
    objective = ActorObjective(Clip(), entropy_coef=0.01, kl_estimator=KlEstimator.K2, kl_coef=0.3)
    loss, sums = objective(log_probs, entropy, columns, ROWS)
    parts = [clipped_policy_loss(log_probs, columns, ROWS, Clip()), entropy_bonus(entropy, columns)]
    parts.append(kl_loss(log_probs, columns, KlEstimator.K2))
    (policy, _), (bonus, _), (divergence, _) = parts
    torch.testing.assert_close(loss, policy + 0.01 * bonus + 0.3 * divergence)
    metrics = finish_metrics(sums)
    assert metrics["loss"] == pytest.approx(loss.item())
    assert metrics["rollout_gap"] == pytest.approx(1.0)
    assert {"policy_loss", "kl_loss", "kl", "entropy", "ratio", "clip_fraction", "approx_kl"} <= metrics.keys()


def test_the_pretraining_loss_is_a_supervised_one_with_a_coefficient():
    columns, log_probs = TokenColumns(weight=weights()), randn(8).requires_grad_()
    loss, sums = pretraining_loss(log_probs, columns, coef=4.0)
    loss.backward()
    torch.testing.assert_close(log_probs.grad, -4.0 * columns.weight)
    assert loss.item() == pytest.approx(4.0 * sums["ptx_loss"].item()) and list(sums) == ["ptx_loss"]


def test_coefficients_of_zero_leave_a_term_out():
    columns = TokenColumns(weight=weights(), advantages=randn(4))
    entropy = torch.zeros(NUM, dtype=torch.float64, requires_grad=True)
    loss, sums = ActorObjective(Clip())(randn(8).requires_grad_(), entropy, columns, ROWS)
    loss.backward()
    assert entropy.grad is None and "entropy" in sums
    with pytest.raises(ValueError, match="entropy_coef is 0.1"):
        ActorObjective(Clip(), entropy_coef=0.1)(randn(8), None, columns, ROWS)


def test_the_critic_objective_scales_the_gradient():
    columns = TokenColumns(weight=weights(), returns=randn(6))
    values = randn(5).requires_grad_()
    CriticObjective(value_clip=None, coef=0.25)(values, columns)[0].backward()
    torch.testing.assert_close(values.grad, 0.25 * columns.weight * (values.detach() - columns.returns))


def test_missing_columns_and_bad_clips_are_named():
    with pytest.raises(ValueError, match="'advantages'"):
        clipped_policy_loss(randn(1), TokenColumns(weight=weights()), ROWS, Clip())
    with pytest.raises(ValueError, match="'old_values'"):
        value_loss_of(randn(1), TokenColumns(weight=weights(), returns=randn(2)), 0.2)
    for bad in ({"low": 1.1}, {"low": -0.1}, {"high": -0.1}, {"dual": 1.0}, {"high": float("nan")}):
        with pytest.raises(ValueError, match=f"clip {next(iter(bad))} is"):
            Clip(**bad)


def test_case_16_log_prob_and_entropy_under_a_temperature_reach_the_losses():
    tp = AxisGroup(ranks=(0,), index=0, process_group=None)
    head = torch.eye(3, dtype=torch.float64)
    hidden = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)  # the logits
    log_probs, entropy = token_log_probs(hidden, head, torch.tensor([1]), tp, 3, temperature=0.5, with_entropy=True)
    columns = TokenColumns(weight=torch.ones(1), advantages=torch.zeros(1))
    _, sums = ActorObjective(Clip())(log_probs, entropy, columns, ROWS)
    assert finish_metrics(sums)["entropy"] == pytest.approx(0.441057, abs=1e-6)
    assert supervised_loss(log_probs, columns)[0].item() == pytest.approx(2.142932, abs=1e-6)
