"""What lengths predict of batching, counted by hand."""

import pytest

from hybridflow.bench.ragged import (
    CALIBRATED,
    LONG,
    MAX_ROWS,
    PROMPTS,
    SHORT,
    STEPS,
    Costs,
    calibrated,
    call_of,
    drawn_lengths,
    run_seconds,
    static_seconds,
)

FLAT = Costs(dict.fromkeys(CALIBRATED, 1.0), prompt=0.0)
BY_ROWS = Costs({rows: float(rows) for rows in CALIBRATED}, prompt=0.5)


def test_steps_are_counted():
    assert run_seconds([2, 3, 2], FLAT, max_rows=2) == 3  # the first one has no row that decodes
    assert run_seconds([2, 3, 2], FLAT) == 2
    assert run_seconds([1], FLAT) == 0
    assert run_seconds([4, 4, 4], BY_ROWS) == 3 * 0.5 + 3 * 3.0
    assert run_seconds([4, 4, 4], BY_ROWS, max_rows=1) == 3 * 0.5 + 3 * 3.0


def test_costs_lie_on_lines_between_what_was_measured():
    costs = Costs({1: 1.0, 2: 3.0, 4: 4.0}, 0.0)
    assert [costs.step(rows) for rows in (0, 1, 2, 3, 4)] == [0.0, 1.0, 3.0, 3.5, 4.0]


def test_static_batching_waits_for_the_longest():
    lengths = [SHORT] * (MAX_ROWS - 1) + [LONG] + [SHORT] * (MAX_ROWS - 1) + [LONG]
    together, apart = 2 * SHORT + LONG - 1, 2 * (LONG - 1)  # the second long one enters behind two rows of short ones
    assert (static_seconds(lengths, FLAT), run_seconds(lengths, FLAT)) == (apart, together)
    assert static_seconds([SHORT] * MAX_ROWS, FLAT) == run_seconds([SHORT] * MAX_ROWS, FLAT)


def test_a_measurement_has_contexts_as_long_as_the_runs():
    """A response of n tokens decodes in about n steps, with n / 2 tokens behind the prompt on average."""
    lengths = drawn_lengths()
    assert STEPS == sum(length**2 for length in lengths) // sum(lengths)


def test_costs_come_out_of_calls():
    seconds = {call_of(rows, 1): 0.1 * rows for rows in CALIBRATED}
    seconds |= {call_of(rows, STEPS + 1): 0.1 * rows + STEPS * 2.0 * rows for rows in CALIBRATED}
    costs = calibrated(seconds)
    assert costs.prompt == pytest.approx(0.1) and costs.step(3) == pytest.approx(6.0)


def test_one_in_ten_is_long():
    lengths = drawn_lengths()
    assert (lengths.count(LONG), lengths.count(SHORT)) == (PROMPTS // 10, PROMPTS - PROMPTS // 10)
