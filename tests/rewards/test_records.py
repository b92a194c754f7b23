import pytest
import torch

from hybridflow.rewards.records import (
    FaultCounts,
    FaultKind,
    FaultPolicy,
    OnFault,
    RewardFault,
    RewardRequest,
    RowFault,
    Score,
    settle,
)

ROWS = [RewardRequest("sums", "3", "3")] * 3
OUTCOMES = [Score(0.25, {"format": 1}), RowFault(FaultKind.RAISED, "ValueError: no"), Score(1.0)]


def test_a_faulty_row_holds_the_stated_value_and_its_fault():
    result = settle(ROWS, OUTCOMES, FaultPolicy(OnFault.VALUE, value=-1.0))
    assert result.scores.tolist() == [0.25, -1.0, 1.0] and result.scores.dtype is torch.float64
    assert result.valid.tolist() == [True, False, True]
    assert result.extras == ({"format": 1}, {}, {})
    assert result.faults == FaultCounts(raised=1)
    assert result.row_faults[1] == OUTCOMES[1]


def test_or_the_run_stops_and_says_what_happened():
    with pytest.raises(
        RewardFault, match=r"1 of 3 rows failed \(1 raised\); first row 1 .*'sums': raised: ValueError"
    ) as e:
        settle(ROWS, OUTCOMES, FaultPolicy(OnFault.RAISE))
    assert e.value.counts == FaultCounts(raised=1)
    assert settle(ROWS[:1], OUTCOMES[:1], FaultPolicy(OnFault.RAISE)).scores.tolist() == [0.25]


def test_no_rows():
    result = settle([], [], FaultPolicy(OnFault.RAISE))
    assert result.scores.shape == (0,) and result.valid.shape == (0,) and result.faults.total == 0


def test_counts_add_up_and_cover_every_kind():
    assert FaultCounts(raised=1, timed_out=2) + FaultCounts(raised=3) == FaultCounts(raised=4, timed_out=2)
    assert FaultCounts.of(RowFault(kind, "") for kind in FaultKind).by_name() == {kind.value: 1 for kind in FaultKind}


@pytest.mark.parametrize("action, value", [(OnFault.RAISE, 0.0), (OnFault.VALUE, None), (OnFault.VALUE, float("nan"))])
def test_a_policy_says_exactly_what_it_does(action, value):
    with pytest.raises(ValueError, match="finite reward"):
        FaultPolicy(action, value)
