"""The runs of `bench precision` on a few micro-batches, and that its bound goes red."""

from dataclasses import replace

import pytest

from hybridflow.bench.precision import Figures, difference, figures, missed, trained, zipf_rows


@pytest.fixture(scope="module")
def few() -> Figures:
    return figures(zipf_rows(6, 16), trained(1))


def test_the_runs_differ_as_they_should(few: Figures):
    assert difference(few.fp32, few.fp32) == 0.0
    assert difference(few.bf16, few.exact) < 1e-6 < difference(few.bf16_sums, few.exact) < 0.1
    assert 1e-4 < difference(few.bf16, few.fp32) < 0.1
    assert difference(few.first_bf16, few.first_fp32) < 0.1
    assert few.fp32.keys() == few.bf16.keys() == few.exact.keys() == few.bf16_sums.keys()


def test_the_bound_is_held_both_ways(few: Figures):
    right = replace(few, bf16=few.fp32, bf16_sums={name: 1.01 * grad for name, grad in few.fp32.items()})
    assert missed(right) == ""
    assert "more than 1e-03" in missed(replace(right, bf16=right.bf16_sums))
    assert "shows nothing" in missed(replace(right, bf16_sums=right.fp32))
    nothing = {name: grad * float("nan") for name, grad in few.fp32.items()}
    assert missed(replace(right, bf16=nothing)) != ""
