"""Packed rows: each sees itself only, whatever the rectangle; equal rows need no index."""

import pytest
import torch

from hybridflow.kernels.attention import causal_attention_reference
from hybridflow.models.attention import PackedCausal


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("lengths", [(5,), (1, 1, 1), (4, 4), (7, 1, 3), (1, 63)])
def test_equals_each_row_alone(lengths):
    tokens = sum(lengths)
    q, k, v = random(tokens, 4, 6, seed=0), random(tokens, 2, 6, seed=1), random(tokens, 2, 6, seed=2)
    grad = torch.randn(tokens, 4, 6, dtype=torch.float64)
    out = PackedCausal(lengths, q.device)(0, q, k, v)
    ours = torch.autograd.grad(out, (q, k, v), grad)
    rows = [causal_attention_reference(*(x.transpose(0, 1)[None] for x in parts))[0].transpose(0, 1)
            for parts in zip(*(x.split(lengths) for x in (q, k, v)))]
    expected = torch.cat(rows)
    torch.testing.assert_close(out, expected)
    for a, b in zip(ours, torch.autograd.grad(expected, (q, k, v), grad)):
        torch.testing.assert_close(a, b)


def test_equal_rows_are_not_copied():
    assert PackedCausal((3, 3), torch.device("cpu")).slots is None
    assert PackedCausal((3, 2), torch.device("cpu")).slots.tolist() == [0, 1, 2, 3, 4]
    assert PackedCausal((1, 3), torch.device("cpu")).slots.tolist() == [0, 3, 4, 5]
