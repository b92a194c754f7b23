import math

import pytest
import torch

from hybridflow.generation.cuts import bisected_floor, weight_floor
from hybridflow.generation.records import SamplingParams


def some_weights(rows, vocab, dtype, scale=2.0):
    weights = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5), dtype=dtype).mul_(scale).exp_()
    return weights / weights.amax(-1, keepdim=True)


def floor_of(weights, **params):
    return weight_floor(weights, SamplingParams(1, **params))


def summed_floor(row, top_p):
    mass, total = 0.0, math.fsum(row)
    for weight in sorted(row, reverse=True):
        mass += weight
        if mass >= top_p * total:
            break
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("vocab", [1, 40, 301])
def test_top_p_against_a_sort(top_p, dtype, vocab):
    weights = some_weights(40, vocab, dtype)
    want = [[summed_floor(row, top_p)] for row in weights.double().tolist()]
    assert floor_of(weights, top_p=top_p).tolist() == want
    assert bisected_floor(weights, top_p).tolist() == want  # as devices do it


@pytest.mark.parametrize("top_k", [0, 4])
def test_a_mass_that_is_reached_exactly_is_enough(top_k):
    weights = torch.tensor([[0.5, 0.0625, 1.0, 0.4375]])  # of a total of 2
    for top_p, smallest in ((0.5, 1.0), (0.75, 0.5), (0.76, 0.4375), (0.97, 0.0625)):
        assert floor_of(weights, top_k=top_k, top_p=top_p).item() == smallest
        assert bisected_floor(weights, top_p).item() == smallest


def test_ties_at_the_floor_stay_together():
    weights = torch.tensor([[0.25, 1.0, 0.25, 0.25, 0.1]])
    assert floor_of(weights, top_k=2).item() == 0.25
    assert floor_of(weights, top_p=0.6).item() == 0.25
    assert bisected_floor(weights, 0.6).item() == 0.25


@pytest.mark.parametrize("min_p, others, floor", [
    (0.3, {}, 0.3), (0.3, {"top_k": 2}, 0.5), (0.7, {"top_k": 2}, 0.7), (0.3, {"top_p": 0.4}, 1.0),
    (0.3, {"top_p": 0.99}, 0.3), (1.0, {}, 1.0)])
def test_min_p_is_a_share_of_the_likeliest(min_p, others, floor):
    weights = torch.tensor([[0.5, 0.25, 1.0, 0.1]], dtype=torch.float64)
    assert floor_of(weights, min_p=min_p, **others).item() == floor


def test_nothing_restricts_by_default():
    assert floor_of(torch.ones(2, 3)) is None


@pytest.mark.parametrize("top_k", [1, 5, 128, 300, 400])
def test_top_k_is_the_kth_largest(top_k):
    weights = some_weights(7, 301, torch.float32)
    want = weights.sort(-1, descending=True).values[:, [min(top_k, 301) - 1]]
    assert torch.equal(floor_of(weights, top_k=top_k), want)
