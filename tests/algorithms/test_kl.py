import numpy as np
import pytest
import torch

from hybridflow.algorithms.kl import LOG_RATIO_BOUND, AdaptiveKl, FixedKl, KlEstimator, kl
from tests.algorithms import dense

LOG_P = torch.tensor([-0.1, -2.0, -5.0, -1.0, -1e-9], dtype=torch.float64)
LOG_Q = torch.tensor([-0.3, -1.0, -5.0, -7.0, -2e-9], dtype=torch.float64)


@pytest.mark.parametrize("estimator", KlEstimator)
def test_kl_equals_the_dense_formula(estimator):
    expected = dense.kl(LOG_P.numpy(), LOG_Q.numpy(), estimator.value)
    np.testing.assert_allclose(kl(LOG_P, LOG_Q, estimator).numpy(), expected, rtol=0, atol=1e-9)


def test_the_gradients():
    d = (LOG_P - LOG_Q).numpy()
    expected = {KlEstimator.K1: np.ones(5), KlEstimator.K2: d, KlEstimator.K3: 1 - np.exp(-d)}
    for estimator, gradient in expected.items():
        log_p = LOG_P.clone().requires_grad_()
        kl(log_p, LOG_Q, estimator).sum().backward()
        np.testing.assert_allclose(log_p.grad.numpy(), gradient, rtol=0, atol=1e-9)


@pytest.mark.parametrize("estimator", KlEstimator)
def test_expectations_over_a_distribution(estimator):
    logits = torch.tensor([0.3, -0.2, 1.0, 0.0], dtype=torch.float64, requires_grad=True)
    log_q = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64).log()
    log_p = logits.log_softmax(0)
    exact = (log_p.exp() * (log_p - log_q)).sum()
    estimates = kl(log_p, log_q, estimator)
    expectation = (log_p.detach().exp() * estimates).sum()  # gradient as a loss on sampled tokens
    exact_grad, loss_grad = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (exact, expectation))
    if estimator is not KlEstimator.K2:
        assert expectation.item() == pytest.approx(exact.item(), abs=1e-12)  # unbiased
    if estimator is KlEstimator.K1:
        assert loss_grad.abs().max() < 1e-12  # as a loss it does nothing
    if estimator is KlEstimator.K2:
        torch.testing.assert_close(loss_grad, exact_grad)  # as a loss it is the KL's gradient
    if estimator is KlEstimator.K3:
        assert (estimates >= 0).all()


@pytest.mark.parametrize("estimator", KlEstimator)
def test_far_policies_stay_finite_in_fp32(estimator):
    log_p = torch.tensor([-200.0, -1.0], requires_grad=True)
    estimate = kl(log_p, torch.tensor([-1.0, -200.0]), estimator)
    estimate.sum().backward()
    assert estimate.isfinite().all() and log_p.grad.isfinite().all()
    assert kl(log_p, torch.tensor([-1.0, -200.0]), KlEstimator.K1).tolist() == [-LOG_RATIO_BOUND, LOG_RATIO_BOUND]


def test_controllers_by_hand():
    assert FixedKl(0.05).after(100.0) == FixedKl(0.05)
    controller = AdaptiveKl(0.1, target=6.0)
    assert controller.after(12.0).coef == pytest.approx(0.1 * 1.02)  # clipped at +0.2
    assert controller.after(6.6).coef == pytest.approx(0.1 * 1.01)
    assert controller.after(6.0).coef == pytest.approx(0.1)
    assert controller.after(0.0).coef == pytest.approx(0.1 * 0.98)
    assert controller.after(float("inf")).coef == pytest.approx(0.1 * 1.02)
    with pytest.raises(ValueError, match="NaN"):
        controller.after(float("nan"))
    with pytest.raises(ValueError, match="target 0"):
        AdaptiveKl(0.1, target=0.0)
