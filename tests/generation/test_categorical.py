"""Both ways to draw, in C++ (where it can be compiled) and in torch, against plain sums."""

import math

import pytest
import torch

from hybridflow.generation.categorical import NativeCategorical, TorchCategorical, categorical_for
from hybridflow.kernels.native_build import Unavailable, native_library

ALMOST_ONE = 1 - 2.0**-53


@pytest.fixture(params=["native", "torch"])
def make(request):
    if request.param == "torch":
        return TorchCategorical
    if isinstance(found := native_library(), Unavailable):
        pytest.skip(found.reason)
    return lambda vocab: NativeCategorical()


def some_logits(rows, vocab, dtype=torch.float64, scale=3.0):
    generator = torch.Generator().manual_seed(vocab)
    return (torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * scale).to(dtype)


@pytest.mark.parametrize("vocab", [1, 2, 3, 5, 63, 64, 65, 100, 1023, 4097])
def test_a_draw_is_the_plain_running_sum(make, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = some_logits(50, vocab)
    logits[torch.rand(50, vocab, generator=generator) < 0.3] = -torch.inf
    logits[:, vocab // 2] = 0
    uniforms = torch.rand(50, generator=generator, dtype=torch.float64)
    tokens, log_probs = make(vocab).draw(logits, uniforms, 0.7)
    running = (logits / 0.7).softmax(-1).cumsum(-1)
    assert torch.equal(tokens, torch.searchsorted(running, uniforms[:, None] * running[:, -1:], right=True)[:, 0])
    want = (logits / 0.7).log_softmax(-1)
    torch.testing.assert_close(log_probs, want.gather(-1, tokens[:, None])[:, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("vocab", [5, 100, 4097])
def test_sums_of_fp32_weights_move_the_borders_by_a_hair_only(make, vocab):
    logits = some_logits(50, vocab, torch.float32, scale=1.0)
    running = logits.double().softmax(-1).cumsum(-1)
    token = torch.randint(vocab, (50, 1), generator=torch.Generator().manual_seed(1))
    for share in (-2e-6, 2e-6):  # a token's cell is as wide as its probability
        border = (running.gather(-1, token)[:, 0] + share).clamp(max=ALMOST_ONE)
        want = torch.searchsorted(running, border[:, None], right=True)[:, 0].clamp(max=vocab - 1)
        assert torch.equal(make(vocab).draw(logits, border, 1.0)[0], want)


@pytest.mark.parametrize("vocab", [1, 7, 64, 999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_of_the_unit_interval_never_pick_what_has_no_probability(make, vocab, dtype):
    generator, draws = torch.Generator().manual_seed(vocab), make(vocab)
    for _ in range(5):
        logits = torch.rand(32, vocab, generator=generator).to(dtype)
        logits[torch.rand(32, vocab, generator=generator) < 0.8] = -torch.inf
        logits[torch.arange(32), torch.randint(vocab, (32,), generator=generator)] = -60.0
        first = logits.isfinite().int().argmax(-1)
        finite = torch.where(logits >= 0, logits, -torch.inf).isfinite().any(-1)  # else -60 is all there is
        tokens, _ = draws.draw(logits, torch.zeros(32, dtype=torch.float64), 1.0)
        assert torch.equal(tokens[~finite], first[~finite]) and logits.gather(-1, tokens[:, None]).isfinite().all()
        tokens, _ = draws.draw(logits, torch.full((32,), ALMOST_ONE, dtype=torch.float64), 1.0)
        assert logits.gather(-1, tokens[:, None]).isfinite().all()


def test_greedy_takes_the_lowest_of_the_likeliest_with_log_probs_under_one(make):
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 3.0]], dtype=torch.float64)
    tokens, log_probs = make(3).draw(logits, None, 0)
    assert tokens.tolist() == [0, 1]
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[torch.arange(2), tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_probs_of_given_tokens_are_those_of_drawn_ones(make, dtype):
    logits = some_logits(20, 777, dtype, scale=5.0)
    draws = make(777)
    for temperature in (0.3, 1.0, 0.0):
        uniforms = None if temperature == 0 else torch.rand(20, dtype=torch.float64)
        tokens, log_probs = draws.draw(logits, uniforms, temperature)
        assert torch.equal(draws.log_probs(logits, tokens, temperature), log_probs)
        want = (logits.double() / (temperature or 1.0)).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        assert log_probs.dtype == dtype and (log_probs - want).abs().max() < (2e-6 if dtype == torch.float32 else 1e-12)


def test_rows_without_numbers_have_nan_log_probs(make):
    logits = torch.tensor([[0.0, math.nan, 1.0], [1.0, 2.0, 3.0], [-math.inf] * 3])
    for temperature in (0.0, 1.0):
        uniforms = None if temperature == 0 else torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        tokens, log_probs = make(3).draw(logits, uniforms, temperature)
        assert log_probs.isnan().tolist() == [True, False, True]
        assert ((tokens >= 0) & (tokens < 3)).all()


@pytest.mark.parametrize("vocab", [7, 100])
def test_the_memory_of_weights_is_kept_for_fewer_rows_and_made_anew_for_others(vocab):
    table = TorchCategorical(vocab)
    for rows, dtype in ((5, torch.float32), (3, torch.float32), (1, torch.float32), (6, torch.float32),
                        (2, torch.float64)):
        logits = some_logits(rows, vocab, dtype)
        tokens = torch.arange(rows) % vocab
        want = (logits.double() / 0.5).log_softmax(-1)[torch.arange(rows), tokens]
        assert (table.log_probs(logits, tokens, 0.5) - want).abs().max() < 2e-6


def test_a_device_has_torch():
    assert isinstance(categorical_for(torch.device("meta"), 7), TorchCategorical)
