import pytest
import torch

from hybridflow.rewards.records import FaultKind, RewardRequest, RewardResult, RowFault, Score

OUTCOMES = [Score(0.25, {"format": 1}), RowFault(FaultKind.RAISED, "ValueError: no\n  number"), Score(1.0)]


def requests(outcomes):
    return [RewardRequest(f"set {row}", "3", "3") for row in range(len(outcomes))]


def test_a_faulty_row_is_not_a_number_and_says_why():
    result = RewardResult.of(OUTCOMES)
    torch.testing.assert_close(
        result.scores, torch.tensor([0.25, float("nan"), 1.0], dtype=torch.float64), rtol=0, atol=0, equal_nan=True
    )
    assert result.extras == ({"format": 1}, {}, {})
    assert result.row_faults == (None, OUTCOMES[1], None)
    assert result.faults == {FaultKind.RAISED: 1}


@pytest.mark.parametrize(
    "outcomes, sentence",
    [
        (OUTCOMES, "1 of 3 rewards failed (1 raised); first: row 1 of data source 'set 1': ValueError: no number"),
        (
            [RowFault(kind, kind.value) for kind in reversed(FaultKind)] + OUTCOMES,
            "7 of 9 rewards failed (2 raised, 1 timed_out, 1 not_finite, 1 wrong_type, 1 crashed, 1 out_of_memory); "
                "first: row 0 of data source 'set 0': out_of_memory",
        ),
        ([Score(0.0)], None),
        ([], None),
    ],
)
def test_the_sentence_counts_every_kind_and_names_the_first_row(outcomes, sentence):
    assert RewardResult.of(outcomes).fault_sentence(requests(outcomes)) == sentence


def test_no_rows():
    result = RewardResult.of([])
    assert result.scores.shape == (0,) and result.scores.dtype is torch.float64 and not result.faults
