import math

import numpy as np
import pytest
import torch

from hybridflow.generation.categorical import TorchCategorical, categorical_for
from hybridflow.generation.random import stream_keys, uniforms
from hybridflow.generation.records import SamplingParams
from hybridflow.generation.sampling import Sampler
from hybridflow.generation.seen_tokens import SeenTokens
from hybridflow.parallel.mesh import AxisGroup
from hybridflow.parallel.vocab import token_log_probs

ALMOST_ONE = 1 - 2.0**-53
LOGITS = torch.tensor([1.2, -0.3, 2.0, 0.4, -1.5, 1.9, -0.2], dtype=torch.float64)


def in_torch(device, vocab_size):
    return TorchCategorical(vocab_size)


WAYS = pytest.mark.parametrize("way", [categorical_for, in_torch])  # on this host, and on a device


def choose(logits, draws, counts=None, seen=None, way=categorical_for, **params):
    sampler = Sampler(SamplingParams(**{"max_new_tokens": 9, **params}), logits.shape[-1], way)
    draws = None if params.get("temperature") == 0 else torch.as_tensor(draws, dtype=torch.float64)
    counts = torch.zeros(len(logits), dtype=torch.int64) if counts is None else counts
    return sampler.choose(logits, draws, counts, seen)


def draw(logits, draws, **params):
    choice = choose(logits, draws, **params)
    return choice.tokens, choice.log_probs


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
    choice = choose(logits, None, temperature=0, top_k=2, top_p=0.5, min_p=0.5)
    assert choice.tokens.tolist() == [0, 1]  # the lowest of equal maxima
    torch.testing.assert_close(choice.log_probs, logits.log_softmax(-1)[torch.arange(2), choice.tokens])
    assert choice.processed is None


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
    choice = choose(logits.repeat(n, 1), grid(n), top_k=top_k,
                    top_p=max(top_p - 1e-6, 1e-9) if top_p < 1 else 1.0)
    tokens = choice.tokens
    assert tokens.unique().tolist() == allowed
    kept = torch.zeros(5, dtype=torch.float64)
    kept[allowed] = probabilities[allowed]
    assert (torch.bincount(tokens, minlength=5) / n - kept / kept.sum()).abs().max() < 1e-3
    # raw log-probs are as without the cuts, processed ones as renormalised by them
    assert (choice.log_probs - probabilities.log()[tokens]).abs().max() < 1e-6
    if top_k or top_p < 1:
        assert (choice.processed - (kept / kept.sum()).log()[tokens]).abs().max() < 1e-6
    else:
        assert choice.processed is None


def reference(logits, seen, count, temperature, top_k, top_p, min_p, repetition_penalty, min_new_tokens, stop_ids):
    """The distribution drawn from, token by token, in plain words."""
    z = logits.tolist()
    if seen is not None and repetition_penalty != 1:
        z = [(x / repetition_penalty if x > 0 else x * repetition_penalty) if s else x
             for x, s in zip(z, seen.tolist())]
    if count < min_new_tokens:
        z = [-math.inf if i in stop_ids else x for i, x in enumerate(z)]
    p = [math.exp((x - max(z)) / temperature) for x in z]
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if top_k:
        order = order[:top_k]
    mass, kept, total = 0.0, [], sum(p[i] for i in order)
    for i in order:
        if mass < top_p * total:
            kept.append(i)
        mass += p[i]
    kept = [i for i in kept if p[i] >= min_p * max(p)]
    total = sum(p[i] for i in kept)
    return torch.tensor([p[i] / total if i in kept else 0.0 for i in range(len(p))], dtype=torch.float64)


@pytest.mark.parametrize("temperature, top_k, top_p, min_p, repetition_penalty, min_new_tokens", [
    (1.0, 0, 1.0, 0.0, 1.0, 0), (0.7, 0, 1.0, 0.3, 1.0, 0), (0.7, 5, 0.8, 0.2, 1.0, 0), (1.3, 0, 0.6, 0.0, 1.7, 0),
    (1.0, 0, 1.0, 0.0, 1.0, 3), (0.9, 3, 1.0, 0.0, 0.6, 3), (2.0, 0, 0.9, 0.05, 1.2, 3),
])
@pytest.mark.parametrize("count", [2, 3])
@WAYS
def test_draws_from_counters_have_the_distribution_of_the_plain_words(temperature, top_k, top_p, min_p,
                                                                       repetition_penalty, min_new_tokens, count, way):
    """Chi-square of 8,000 draws, the streams of as many prompts, against exact probabilities."""
    n, stop_ids = 8_000, (2, 6)
    settings = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                    repetition_penalty=repetition_penalty, min_new_tokens=min_new_tokens, stop_ids=stop_ids)
    seen = torch.tensor([1, 0, 1, 0, 1, 0, 0], dtype=torch.bool)
    keys = stream_keys(3, np.arange(n), np.zeros(n, np.int64))
    draws = torch.from_numpy(uniforms(keys, np.full(n, count)))
    choice = Sampler(SamplingParams(9, **settings), 7, way).choose(
        LOGITS.repeat(n, 1), draws, torch.full((n,), count), seen.repeat(n, 1))
    want = reference(LOGITS, seen, count, **settings)
    drawable, counts = want > 0, torch.bincount(choice.tokens, minlength=7)
    assert counts[~drawable].sum() == 0
    freedom = int(drawable.sum()) - 1
    chi_square = ((counts - n * want) ** 2 / (n * want))[drawable].sum().item()
    assert chi_square < freedom + 5 * (2 * max(freedom, 1)) ** 0.5
    raw = (LOGITS / temperature).log_softmax(-1)
    torch.testing.assert_close(choice.log_probs, raw[choice.tokens], rtol=0, atol=1e-12)
    processed = choice.log_probs if choice.processed is None else choice.processed
    torch.testing.assert_close(processed, want.log()[choice.tokens], rtol=0, atol=1e-12)


def test_the_two_log_probs_are_told_apart_exactly_where_they_can_differ():
    def processed(**params):
        seen = torch.zeros(1, 7, dtype=torch.bool) if "repetition_penalty" in params else None
        return choose(LOGITS[None], [0.5], seen=seen, **params).processed
    for raw in ({}, {"temperature": 0.5}, {"stop_ids": (1,)}, {"min_new_tokens": 2},
                {"temperature": 0, "top_k": 3}, {"temperature": 0, "min_p": 0.5}):
        assert processed(**raw) is None, raw
    for other in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1},
                  {"min_new_tokens": 2, "stop_ids": (1,)}, {"temperature": 0, "repetition_penalty": 1.1}):
        assert processed(**other) is not None, other


def test_greedy_is_greedy_under_penalties():
    seen = torch.tensor([[0, 0, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 1, 0]], dtype=torch.bool)
    choice = choose(LOGITS.repeat(2, 1), None, counts=torch.tensor([1, 2]), seen=seen, temperature=0,
                    repetition_penalty=2.0, min_new_tokens=2, stop_ids=(5,))
    assert choice.tokens.tolist() == [0, 2]  # 2.0 / 2 is below 1.2, and 1.9 must not end it; then 2.0 / 2 > 1.9 / 2
    torch.testing.assert_close(choice.log_probs, LOGITS.log_softmax(-1)[choice.tokens])
    for row, count in ((0, 1), (1, 2)):
        want = reference(LOGITS, seen[row], count, 1.0, 0, 1.0, 0.0, 2.0, 2, (5,))
        assert choice.processed[row].item() == pytest.approx(math.log(want[choice.tokens[row]]), abs=1e-12)


@WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_do_not_depend_on_each_other_nor_on_the_rows_before(dtype, way):
    """One sampler, other batches: the same tokens and log-probs, also in memory that was used before."""
    logits = (torch.randn(9, 501, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    counts = torch.arange(9)
    draws = torch.from_numpy(uniforms(stream_keys(0, np.arange(9), np.arange(9)), np.arange(9)))
    seen = torch.rand(9, 501, generator=torch.Generator().manual_seed(2)) < 0.3
    for params in ({}, {"top_p": 0.8}, {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.3, "min_new_tokens": 4,
                                        "stop_ids": (3, 500)}):
        sampler, gap = Sampler(SamplingParams(9, **params), 501, way), 0 if way is categorical_for else 1e-6
        whole = sampler.choose(logits, draws, counts, seen)
        for rows in ([4], [8, 0, 4], list(range(9))):
            part = sampler.choose(logits[rows], draws[rows], counts[rows], seen[rows])
            assert torch.equal(part.tokens, whole.tokens[rows])
            torch.testing.assert_close(part.log_probs, whole.log_probs[rows], rtol=0, atol=gap)
            if whole.processed is not None:
                torch.testing.assert_close(part.processed, whole.processed[rows], rtol=0, atol=gap)


def test_logits_are_left_as_they_were():
    logits = torch.randn(3, 10, dtype=torch.float64)
    before = logits.clone()
    choose(logits, grid(3), temperature=0.5, top_k=2, top_p=0.5, repetition_penalty=1.5, min_new_tokens=3,
           stop_ids=(1,), seen=torch.ones(3, 10, dtype=torch.bool))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 2, "min_p": 0.1}])
def test_logits_that_are_not_numbers_show_in_the_log_prob(params):
    logits = torch.tensor([[0.0, math.nan, 1.0], [1.0, 2.0, 3.0], [-math.inf] * 3])
    tokens, log_probs = draw(logits, grid(3), **params)
    assert log_probs.isnan().tolist() == [True, False, True]
    assert ((tokens >= 0) & (tokens < 3)).all()


def test_seen_tokens_are_those_of_the_sequence_in_the_slot():
    seen = SeenTokens(4, 10, torch.device("cpu"))
    seen.begin(2, (5, 9, 5))
    seen.begin(0, (1,))
    slots = torch.tensor([2, 0])
    seen.add(slots, torch.tensor([7, 7]))
    assert [row.nonzero().flatten().tolist() for row in seen.of(slots)] == [[5, 7, 9], [1, 7]]
    seen.begin(2, (3,))
    assert [row.nonzero().flatten().tolist() for row in seen.of(slots)] == [[3], [1, 7]]


@pytest.mark.parametrize("field, value", [
    ("max_new_tokens", 0), ("temperature", -0.1), ("temperature", math.inf), ("temperature", math.nan), ("top_k", -1),
    ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.5), ("repetition_penalty", 0.0),
    ("repetition_penalty", math.inf), ("min_new_tokens", -1), ("min_new_tokens", 5)])
def test_values_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        SamplingParams(**{"max_new_tokens": 4, field: value})


def test_all_faults_are_told_at_once():
    with pytest.raises(ValueError, match=r"top_k is -1.*; min_p is 2.*; stop_strings is \('a', ''\)"):
        SamplingParams(4, top_k=-1, min_p=2, stop_strings=("a", ""))
    with pytest.raises(ValueError, match="stop id 7 is not in the vocabulary of 7; stop id -1 is"):
        Sampler(SamplingParams(4, stop_ids=(7, -1)), 7)
    with pytest.raises(ValueError, match="min_new_tokens is 2, but every token is a stop id"):
        Sampler(SamplingParams(4, min_new_tokens=2, stop_ids=(0, 1)), 2)
