import pytest
import torch

from hybridflow.algorithms.ragged import at_last_token, discounted_suffix_sum, next_in_row, row_sums, to_tokens

LENGTHS = (2, 0, 3, 1)
X = torch.tensor([1.0, 10.0, 100.0, 1e3, 1e4, 1e5], dtype=torch.float64)


def test_rows_are_summed_and_spread():
    assert row_sums(X, LENGTHS).tolist() == [11.0, 0.0, 11100.0, 1e5]
    assert to_tokens(torch.tensor([1, 2, 3, 4]), LENGTHS).tolist() == [1, 1, 3, 3, 3, 4]


def test_next_stays_in_the_row():
    assert next_in_row(X, LENGTHS).tolist() == [10.0, 0.0, 1e3, 1e4, 0.0, 0.0]
    assert next_in_row(X, LENGTHS, 2).tolist() == [0.0, 0.0, 1e4, 0.0, 0.0, 0.0]


def test_last_token_is_the_last_unmasked_one():
    mask = torch.tensor([1, 0, 0, 0, 0, 1])
    row_values = torch.tensor([7.0, 8.0, 9.0, 5.0])
    assert at_last_token(row_values, mask, LENGTHS).tolist() == [7.0, 0, 0, 0, 0, 5.0]
    assert at_last_token(row_values, torch.ones(6), LENGTHS).tolist() == [0, 7.0, 0, 0, 9.0, 5.0]


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0])
def test_suffix_sum_by_hand(factor):
    expected = [1 + 10 * factor, 10.0, 100 + 1e3 * factor + 1e4 * factor**2, 1e3 + 1e4 * factor, 1e4, 1e5]
    assert discounted_suffix_sum(X, LENGTHS, factor).tolist() == expected


def test_a_nan_stays_in_its_row():
    x = X.clone()
    x[2] = float("nan")
    result = discounted_suffix_sum(x, LENGTHS, 1.0)
    assert result.isnan().tolist() == [False, False, True, False, False, False]


def test_nothing_at_all():
    assert discounted_suffix_sum(torch.zeros(0), (), 1.0).shape == (0,)
    assert at_last_token(torch.zeros(2), torch.zeros(0), (0, 0)).shape == (0,)


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"lengths \(2, 1\) need \(3,\)"):
        row_sums(X, (2, 1))
