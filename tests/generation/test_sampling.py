import math

import pytest
import torch

from hybridflow.generation.records import SamplingParams
from hybridflow.generation.sampling import inverse_cdf, sample_tokens, weight_floor
from hybridflow.parallel.mesh import AxisGroup
from hybridflow.parallel.vocab import token_log_probs

ALMOST_ONE = 1 - 2.0**-53


def draw(logits, uniforms, **params):
    return sample_tokens(logits, torch.as_tensor(uniforms, dtype=torch.float64),
                         SamplingParams(max_new_tokens=1, **params))


def grid(n):
    """n uniforms in the middles of equal cells."""
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def test_case_16_log_prob_and_entropy_under_a_temperature():
    """Logits [2, 1, 0] at T=0.5, as the sampler and as the trainer see them."""
    logits = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    tokens, log_probs = draw(logits.repeat(3, 1), [0.5, 0.9, ALMOST_ONE], temperature=0.5)
    assert tokens.tolist() == [0, 1, 2]
    assert log_probs[1].item() == pytest.approx(-2.142932, abs=1e-6)
    assert -(log_probs.exp() * log_probs).sum().item() == pytest.approx(0.441057, abs=1e-6)

    trained, entropy = token_log_probs(logits.repeat(3, 1), torch.eye(3, dtype=torch.float64), torch.arange(3),
                                       AxisGroup((0,), 0, None), 3, temperature=0.5, with_entropy=True)
    torch.testing.assert_close(trained, log_probs, rtol=0, atol=1e-12)
    assert entropy[1].item() == pytest.approx(0.441057, abs=1e-6)


def test_case_16_temperature_zero_is_greedy_with_log_probs_under_one():
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 3.0]], dtype=torch.float64)
    tokens, log_probs = draw(logits, [ALMOST_ONE, ALMOST_ONE], temperature=0)
    assert tokens.tolist() == [0, 1]  # the lowest of equal maxima
    assert torch.equal(log_probs, logits.log_softmax(-1)[torch.arange(2), tokens])


def test_case_17_log_probs_from_fp32_logits():
    logits = torch.randn(256, 50_000, generator=torch.Generator().manual_seed(0)) * 4
    uniforms = torch.rand(256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens, log_probs = draw(logits, uniforms)
    want = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert log_probs.dtype == torch.float32
    assert (log_probs - want).abs().max() < 1e-5


def test_bf16_logits_are_computed_with_in_fp32():
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens, log_probs = draw(logits, grid(64), temperature=0.7)
    want = (logits.double() / 0.7).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert log_probs.dtype == torch.float32
    assert (log_probs - want).abs().max() < 1e-5


@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 63, 64, 65, 100, 1023, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_cdf_is_the_plain_running_sum(vocab, dtype):
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.randn(50, vocab, generator=generator, dtype=dtype).mul_(3).exp_()
    weights[torch.rand(50, vocab, generator=generator) < 0.3] = 0
    weights[:, vocab // 2] += 0.1
    uniforms = torch.rand(50, generator=generator, dtype=torch.float64)
    running = weights.double().cumsum(-1)
    want = torch.searchsorted(running, uniforms[:, None] * running[:, -1:], right=True)[:, 0]
    assert torch.equal(inverse_cdf(weights, uniforms), want)


@pytest.mark.parametrize("vocab", [1, 7, 64, 999])
def test_the_ends_of_the_unit_interval_never_pick_a_weight_of_zero(vocab):
    generator = torch.Generator().manual_seed(vocab)
    for _ in range(20):
        weights = torch.rand(32, vocab, generator=generator)
        weights[torch.rand(32, vocab, generator=generator) < 0.8] = 0
        weights[torch.arange(32), torch.randint(vocab, (32,), generator=generator)] = 1e-30
        first = (weights > 0).int().argmax(-1)
        last = vocab - 1 - (weights > 0).flip(-1).int().argmax(-1)
        assert torch.equal(inverse_cdf(weights, torch.zeros(32, dtype=torch.float64)), first)
        tokens = inverse_cdf(weights, torch.full((32,), ALMOST_ONE, dtype=torch.float64))
        assert (weights[torch.arange(32), tokens] > 0).all()
        assert (tokens <= last).all()


def test_frequencies_are_the_probabilities():
    n, logits = 20_000, torch.tensor([0.5, -1.0, 2.0, 0.0, -torch.inf], dtype=torch.float64)
    tokens, _ = draw(logits.repeat(n, 1), grid(n), temperature=1.5)
    want = (logits / 1.5).softmax(-1)
    got = torch.bincount(tokens, minlength=5) / n
    assert (got - want).abs().max() < 1e-4  # an even grid of uniforms, so only its spacing is left
    assert got[4] == 0


@pytest.mark.parametrize("top_k, top_p, allowed", [
    (0, 1.0, [0, 1, 2, 3, 4]), (1, 1.0, [1]), (2, 1.0, [1, 3]), (99, 1.0, [0, 1, 2, 3, 4]),
    (0, 0.4, [1]), (0, 0.41, [1, 3]), (0, 0.7, [1, 3]), (0, 0.71, [0, 1, 3]), (0, 1e-9, [1]),
    (2, 0.55, [1]), (2, 0.6, [1, 3]),  # of what top-k left, 0.4 / 0.7 = 0.571 is the first token's share
])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_k_then_top_p(top_k, top_p, allowed, dtype):
    probabilities = torch.tensor([0.15, 0.4, 0.1, 0.3, 0.05], dtype=torch.float64)
    logits = probabilities.log().to(dtype)
    n = 2000
    # a hair off the exact sums, which no float has
    tokens, log_probs = draw(logits.repeat(n, 1), grid(n), top_k=top_k, top_p=max(top_p - 1e-6, 1e-9)
                             if top_p < 1 else 1.0)
    assert tokens.unique().tolist() == allowed
    kept = torch.zeros(5, dtype=torch.float64)
    kept[allowed] = probabilities[allowed]
    assert (torch.bincount(tokens, minlength=5) / n - kept / kept.sum()).abs().max() < 1e-3
    # log-probs are raw: top-k and top-p do not change them
    assert (log_probs - probabilities.log()[tokens]).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.999])
def test_top_p_against_a_sort(top_p, dtype):
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(40, 301, generator=generator, dtype=dtype).mul_(2).exp_()
    weights /= weights.amax(-1, keepdim=True)
    floor = weight_floor(weights, SamplingParams(max_new_tokens=1, top_p=top_p))
    for row, got in zip(weights.double().tolist(), floor.tolist()):
        mass, total = 0.0, math.fsum(row)
        for weight in sorted(row, reverse=True):
            mass += weight
            if mass >= top_p * total:
                break
        assert got[0] == weight


@pytest.mark.parametrize("top_k", [0, 4])
def test_a_mass_that_is_reached_exactly_is_enough(top_k):
    weights = torch.tensor([[0.5, 0.0625, 1.0, 0.4375]])  # of a total of 2
    for top_p, smallest in ((0.5, 1.0), (0.75, 0.5), (0.76, 0.4375), (0.97, 0.0625)):
        assert weight_floor(weights, SamplingParams(max_new_tokens=1, top_k=top_k, top_p=top_p)).item() == smallest


def test_ties_at_the_floor_stay_together():
    logits = torch.tensor([1.0, 3.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    tokens, _ = draw(logits.repeat(500, 1), grid(500), top_k=2)
    assert tokens.unique().tolist() == [0, 1, 2, 3]


def test_logits_are_left_as_they_were():
    logits = torch.randn(3, 10, dtype=torch.float64)
    before = logits.clone()
    draw(logits, grid(3), temperature=0.5, top_k=2, top_p=0.5)
    assert torch.equal(logits, before)


def test_logits_that_are_not_numbers_show_in_the_log_prob():
    logits = torch.tensor([[0.0, math.nan, 1.0], [1.0, 2.0, 3.0], [-math.inf] * 3])
    for temperature in (0, 1.0):
        tokens, log_probs = draw(logits, grid(3), temperature=temperature)
        assert log_probs.isnan().tolist() == [True, False, True]
        assert ((tokens >= 0) & (tokens < 3)).all()


@pytest.mark.parametrize("field, value", [("max_new_tokens", 0), ("temperature", -0.1), ("temperature", math.inf),
                                          ("temperature", math.nan), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1)])
def test_values_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        SamplingParams(**{"max_new_tokens": 4, field: value})
