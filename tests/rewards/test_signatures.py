"""verl's reward functions, of one row and of a batch, work as they were written."""

from contextlib import closing
from pathlib import Path

import pytest

from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.records import FaultKind, RewardRequest

FUNCTIONS = Path(__file__).with_name("signatures.py")


def load(name, **settings):
    return closing(RewardFunction.load(f"{FUNCTIONS}:{name}", **({"timeout_s": 30.0} | settings)))


def rows(*solutions):
    return [RewardRequest("test", solution, "ab", {"index": place}) for place, solution in enumerate(solutions)]


@pytest.mark.parametrize(("name", "scores"), [
    ("compute_score", [1.0, 0.0]), ("only_some", [1.0, 0.0]), ("by_position", [2.0, 1.0]),
    ("other_order", [22.0, 21.0]),
    ("scorer", [0.5, 0.5]), ("anything", [0.25, 0.25]), ("compute_score_batched", [1.0, 0.0]),
    ("batched_by_position", [2.0, 1.0])])
def test_a_function_is_called_as_it_wants_to_be(name: str, scores: list[float]):
    with load(name) as function:
        assert function.batched == ("batched" in name)
        result = function.score(rows("ab", "a"))
        assert result.scores.tolist() == scores, result.row_faults
        assert function.score([]).scores.shape == (0,)
    if name == "compute_score":
        assert result.extras[1] == {"acc": False, "pred": "a"}


def test_a_signature_may_be_overruled():
    with load("anything", batched=True) as function:
        assert function.batched and function.score(rows("ab", "a")).scores.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="does not take the keywords data_sources, solution_strs"):
        load("compute_score", batched=True)  # verl's takes whatever comes, but asks for data_source
    with pytest.raises(ValueError, match="does not take the keywords data_source, solution_str"):
        load("compute_score_batched", batched=False)


def test_faults_of_a_batch_are_told_by_row():
    with load("compute_score_batched", timeout_s=2.0) as function:
        result = function.score(rows("ab", "nan", "none", "b"))
        assert [score for score in result.scores.tolist() if score == score] == [1.0, 0.0]
        assert [fault and fault.kind for fault in result.row_faults] == [
            None, FaultKind.NOT_FINITE, FaultKind.WRONG_TYPE, None]
        assert result.extras[0] == {"rows": 4}
        assert function.score(rows("array", "a")).scores.tolist() == [1.0, 0.0]
        for bad, kind in (("short", FaultKind.WRONG_TYPE), ("text", FaultKind.WRONG_TYPE), ("die", FaultKind.RAISED),
                          ("spin", FaultKind.TIMED_OUT)):
            assert function.score(rows("ab", bad, "a")).faults == {kind: 3}
        assert "1 rewards were returned for 3 rows" in function.score(rows("ab", "short", "a")).row_faults[0].message


def test_rows_are_handed_in_one_by_one_and_collected_in_any_order():
    with load("compute_score_batched") as batched, load("other_order") as single:
        for function, scores in ((batched, [0.0, 1.0]), (single, [21.0, 22.0])):
            for name, request in zip("cba", rows("a", "ab", "abc")):
                function.submit(name, request)
            assert [outcome.value for outcome in function.collect(["c", "b"]).values()] == scores
            assert set(function.collect()) == {"a"} and function.collect() == {}
            function.submit("a", rows("ab")[0])
            assert set(function.collect()) == {"a"}
            function.submit("b", rows("ab")[0])
            function.close()  # what was not collected is forgotten
            assert function.collect() == {}
            assert not function.score(rows("ab")).faults


def test_every_worker_that_is_asked_for_works():
    file = FUNCTIONS.with_name("functions.py")
    with closing(RewardFunction.load(f"{file}:worker_id", timeout_s=30.0, num_workers=2)) as function:
        assert len(set(function.score(rows(*"abcdef")).scores.tolist())) == 2


def test_what_cannot_be_sent_is_an_error_of_whoever_hands_it_in():
    with load("scorer") as function:
        with pytest.raises(Exception, match="pickle"):
            function.submit("a", RewardRequest("test", "", "", {"file": open(__file__)}))
