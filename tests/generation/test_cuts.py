import math

import pytest
import torch

from hybridflow.generation.cuts import bisected_floor, logit_floor, mass_index
from hybridflow.generation.records import SamplingParams


def some_logits(rows, vocab, dtype, scale=2.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5), dtype=dtype).mul_(scale)


def floor_of(logits, **params):
    return logit_floor(logits, SamplingParams(1, **params))


def summed_floor(row, top_p, temperature):
    """The logit with which the mass of the likeliest reaches `top_p`."""
    top = max(row)
    mass, total = 0.0, math.fsum(math.exp((z - top) / temperature) for z in row)
    for logit in sorted(row, reverse=True):
        mass += math.exp((logit - top) / temperature)
        if mass >= top_p * total:
            break
    return logit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("vocab, temperature", [(1, 1.0), (40, 0.5), (301, 1.0), (3000, 3.0)])
def test_top_p_against_a_sort(top_p, dtype, vocab, temperature):
    logits = some_logits(10, vocab, dtype)
    want = [[summed_floor(row, top_p, temperature)] for row in logits.double().tolist()]
    assert floor_of(logits, top_p=top_p, temperature=temperature).tolist() == want
    weights = ((logits - logits.amax(-1, keepdim=True)) / temperature).exp()
    floor = bisected_floor(weights, top_p)  # as devices do it
    assert torch.where(weights >= floor, logits, torch.inf).amin(-1, keepdim=True).tolist() == want


def test_a_mass_that_is_reached_exactly_is_enough():
    weights = torch.tensor([[1.0, 0.5, 0.4375, 0.0625]], dtype=torch.float64)  # of a total of 2
    for top_p, place in ((0.5, 0), (0.75, 1), (0.76, 2), (0.97, 3), (1.0, 3)):
        assert mass_index(weights, top_p, torch.tensor([[2.0]], dtype=torch.float64)).item() == place
        assert bisected_floor(weights.float(), top_p).item() == weights[0, place]


def test_ties_at_the_floor_stay_together():
    weights = torch.tensor([[0.25, 1.0, 0.25, 0.25, 0.1]])
    tied = weights[0, 0].log()
    assert floor_of(weights.log(), top_k=2).item() == tied
    assert floor_of(weights.log(), top_p=0.6).item() == tied
    assert bisected_floor(weights, 0.6).item() == 0.25


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("min_p, others, floor", [
    (0.3, {}, 0.3), (0.3, {"top_k": 2}, 0.5), (0.7, {"top_k": 2}, 0.7), (0.3, {"top_p": 0.4}, 1.0),
    (0.3, {"top_p": 0.999}, 0.3), (1.0, {}, 1.0)])
def test_min_p_is_a_share_of_the_likeliest(min_p, others, floor, temperature):
    weights = torch.tensor([[0.5, 0.25, 1.0, 0.1]], dtype=torch.float64)
    found = floor_of(weights.log() * temperature + 7, min_p=min_p, temperature=temperature, **others)
    assert ((found - 7) / temperature).exp().item() == pytest.approx(floor)


def test_nothing_restricts_by_default():
    assert floor_of(torch.ones(2, 3)) is None


@pytest.mark.parametrize("top_k", [1, 5, 128, 300, 400])
def test_top_k_is_the_kth_largest(top_k):
    logits = some_logits(7, 301, torch.float32)
    want = logits.sort(-1, descending=True).values[:, [min(top_k, 301) - 1]]
    assert torch.equal(floor_of(logits, top_k=top_k), want)


def test_tokens_that_are_out_already_count_for_nothing():
    """Stop ids before the shortest response, say."""
    logits = torch.tensor([[-math.inf, 2.0, -math.inf, 1.0]])
    assert floor_of(logits, top_k=3).item() == -math.inf
    assert floor_of(logits, top_p=0.9).item() == 1.0
    assert floor_of(logits, top_k=3, top_p=0.5, min_p=0.1).item() == 2.0
