import pytest

from hybridflow.generation.admission import (
    Limits,
    SharedPrompt,
    admit,
    cheapest_merge,
    similar_lengths,
    waiting_order,
)
from hybridflow.generation.records import Prompt


def prompts(*rows):
    return [Prompt(i, 0, ids) for i, ids in enumerate(rows)]


def test_longest_first_and_equal_prompts_side_by_side():
    assert waiting_order(prompts((1,), (5, 6), (1, 2, 3), (4, 9), (5, 6))) == [2, 3, 1, 4, 0]


@pytest.mark.parametrize("waiting, running, admitted", [
    (0, 0, 0), (0, 8, 0), (5, 0, 5), (5, 6, 2), (5, 7, 0), (1, 7, 1), (1, 8, 0), (99, 6, 2), (99, 0, 8),
])
def test_a_quarter_of_the_batch_is_free_or_all_that_waits_fits(waiting, running, admitted):
    requests = prompts(*((i,) for i in range(waiting)))
    cohort = admit(range(waiting), requests, running, Limits(max_rows=8, max_prefill_tokens=100))
    assert [prompt.requests for prompt in cohort] == [(i,) for i in range(admitted)]


def test_a_batch_of_one_row_admits_when_it_is_empty():
    assert len(admit([0, 1], prompts((1,), (2,)), 0, Limits(1, 100))) == 1
    assert admit([0, 1], prompts((1,), (2,)), 1, Limits(1, 100)) == []


def test_samples_of_one_prompt_enter_together():
    requests = prompts((1, 2), (1, 2), (3, 4), (3, 4), (3, 4))
    first, second = SharedPrompt((1, 2), (0, 1)), SharedPrompt((3, 4), (2, 3, 4))
    assert admit(range(5), requests, 0, Limits(4, 100)) == [first]
    assert admit(range(5), requests, 0, Limits(5, 100)) == [first, second]
    assert admit([2, 3, 4], requests, 2, Limits(4, 100)) == []
    assert admit([2, 3, 4], requests, 1, Limits(4, 100)) == [second]


def test_a_prompt_with_more_samples_than_the_batch_is_cut():
    requests = prompts((7,), (7,), (7,))
    assert admit([0, 1, 2], requests, 0, Limits(2, 100)) == [SharedPrompt((7,), (0, 1))]
    assert admit([0, 1, 2], requests, 1, Limits(2, 100)) == []


def test_prefill_tokens_are_those_of_distinct_prompts_and_one_long_prompt_is_taken():
    requests = prompts((1,) * 9, (1,) * 9, (2,) * 4, (3,) * 2)
    assert len(admit(range(4), requests, 0, Limits(8, 13))) == 2
    assert len(admit(range(4), requests, 0, Limits(8, 5))) == 1


def test_runs_of_similar_lengths():
    cohort = [SharedPrompt((0,) * length, (0,)) for length in (100, 80, 75, 74, 58, 57, 1)]
    assert [[len(p.ids) for p in run] for run in similar_lengths(cohort)] == [[100, 80, 75], [74, 58, 57], [1]]


def test_the_merge_that_adds_the_least_masked_work():
    assert cheapest_merge([(64, 100), (1, 900), (2, 950)]) == 1
    assert cheapest_merge([(3, 100), (3, 100), (1, 5)]) == 0
    assert cheapest_merge([(1, 5), (1, 900)]) == 0
