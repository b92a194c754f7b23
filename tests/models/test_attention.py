"""Packed rows: each sees itself only, whatever the rectangles; equal rows need no index."""

from math import nan

import pytest
import torch

from hybridflow.kernels.attention import causal_attention_reference
from hybridflow.models import attention
from hybridflow.models.attention import PackedCausal
from hybridflow.models.slots import from_slots, to_slots
from tests.models.operations import Operations

CPU = torch.device("cpu")
SKEWED = (1, 2, 63, 100, 1000)
MANY = (600, 3, 1, 900, 40, 1000, 2, 1, 330)


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def inputs(lengths):
    tokens = sum(lengths)
    q, k, v = random(tokens, 4, 6, seed=0), random(tokens, 2, 6, seed=1), random(tokens, 2, 6, seed=2)
    return q, k, v, random(tokens, 4, 6, seed=3).detach()


@pytest.mark.parametrize("lengths", [(5,), (1, 1, 1), (4, 4), (7, 1, 3), (1, 63), SKEWED, SKEWED[::-1], MANY], ids=str)
def test_equals_each_row_alone(lengths):
    q, k, v, grad = inputs(lengths)
    out = PackedCausal(lengths, CPU)(0, q, k, v)
    ours = torch.autograd.grad(out, (q, k, v), grad)
    rows = [causal_attention_reference(*(x.transpose(0, 1)[None] for x in parts))[0].transpose(0, 1)
            for parts in zip(*(x.split(lengths) for x in (q, k, v)))]
    expected = torch.cat(rows)
    torch.testing.assert_close(out, expected)
    for a, b in zip(ours, torch.autograd.grad(expected, (q, k, v), grad)):
        torch.testing.assert_close(a, b)


def test_skewed_rows_take_several_rectangles():
    assert len(PackedCausal(SKEWED, CPU).rectangles) == 2 and len(PackedCausal(MANY, CPU).rectangles) == 3


def test_equal_rows_are_not_copied():
    assert PackedCausal((3, 3), CPU).slots is None and PackedCausal((2000,) * 3, CPU).slots is None
    assert PackedCausal((3, 2), CPU).slots.tolist() == [0, 1, 2, 3, 4]
    assert PackedCausal((1, 3), CPU).slots.tolist() == [0, 3, 4, 5]
    assert PackedCausal((1, 1000), CPU).slots.tolist() == [1000, *range(1000)]


@pytest.mark.parametrize("lengths", [(7, 1, 3), (600, 3, 1, 40)], ids=str)
def test_a_row_of_nan_spoils_no_other(lengths):
    """Padding has the values of its own row: neither answers nor gradients of the others change by a bit."""
    q, k, v, grad = inputs(lengths)
    clean = PackedCausal(lengths, CPU)(0, q, k, v)
    expected = [clean, *torch.autograd.grad(clean, (q, k, v), grad)]
    for row in range(len(lengths)):
        mine = torch.zeros(len(lengths), dtype=torch.bool).index_fill_(0, torch.tensor(row), True)
        mine = mine.repeat_interleave(torch.tensor(lengths))
        poisoned = [x.detach().masked_fill(mine[:, None, None], nan).requires_grad_() for x in (q, k, v)]
        out = PackedCausal(lengths, CPU)(0, *poisoned)
        for a, b in zip([out, *torch.autograd.grad(out, poisoned, grad)], expected, strict=True):
            assert torch.equal(a[~mine], b[~mine])


@pytest.mark.parametrize("lengths", [(7, 1, 3), MANY], ids=str)
def test_padding_does_not_matter(lengths, monkeypatch):
    """Padding far from every token changes no answer and no gradient by a bit, and NaN as its answer is not read."""
    q, k, v, grad = inputs(lengths)
    attend = PackedCausal(lengths, CPU)
    expected = attend(0, q, k, v)
    expected = [expected, *torch.autograd.grad(expected, (q, k, v), grad)]
    padding = torch.ones_like(attend.tokens, dtype=torch.bool).index_fill_(0, attend.slots, False).nonzero().squeeze(1)
    assert padding.numel() > 0
    monkeypatch.setattr(attention, "to_slots", lambda x, *places: to_slots(x, *places).index_fill(0, padding, 1e3))
    monkeypatch.setattr(attention, "from_slots", lambda x, slots: from_slots(x.index_fill(0, padding, nan), slots))
    out = attend(0, q, k, v)
    for a, b in zip([out, *torch.autograd.grad(out, (q, k, v), grad)], expected, strict=True):
        assert torch.equal(a, b)


def test_a_tensor_is_gathered_once_each_way(monkeypatch):
    """However many rectangles there are: only attention is called for each."""
    calls = []
    real = attention.causal_attention
    monkeypatch.setattr(attention, "causal_attention", lambda *parts: calls.append(parts[0].shape) or real(*parts))
    q, k, v, grad = inputs(MANY)
    attend = PackedCausal(MANY, CPU)
    with Operations() as forward:
        out = attend(0, q, k, v)
    assert calls == [(3, 4, 1000, 6), (1, 4, 330, 6), (5, 4, 40, 6)]
    assert (forward.count["index_select"], forward.count["cat"]) == (4, 1)
    with Operations() as backward:
        out.backward(grad)
    assert (backward.count["index_select"], backward.count["index_copy_"], backward.count["cat"]) == (3, 1, 3)
