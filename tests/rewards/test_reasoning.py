from contextlib import closing

import pytest
import reasoning_gym

from hybridflow.rewards.function import ReasoningScoring, RewardFunction
from hybridflow.rewards.plain_answers import EXPRESSIONS, LISTS, may_be_scored
from hybridflow.rewards.reasoning import extract_answer, score_exact, score_partial
from hybridflow.rewards.records import FaultKind, RewardRequest


@pytest.mark.parametrize(
    "completion, answer",
    [
        (" 12\n", "12"),
        ("so 5 + 7 is <answer> 12 </answer>.", "12"),
        ("<answer>11</answer> no, <answer>\n12\n</answer>", "12"),
        ("<answer>12", "<answer>12"),
        ("<answer></answer>", ""),
        ("<answer>1\n2</answer>", "1\n2"),
        ("", ""),
    ],
)
def test_the_answer_is_what_is_tagged_or_everything(completion, answer):
    assert extract_answer(completion) == answer


def entry_of(task, index=0):
    return reasoning_gym.create_dataset(task, size=index + 1, seed=0)[index]


def judge(score, task, text, entry):
    return score(data_source=task, solution_str=text, ground_truth=entry["answer"], extra_info={"entry": entry})


@pytest.mark.parametrize("task", ["chain_sum", "gcd", "spell_backward", "number_sorting", "countdown", "n_queens"])
def test_the_right_answer_is_right(task):
    entry = entry_of(task)
    for text in (entry["answer"], f" {entry['answer']}\n", f"I think <answer>{entry['answer']}</answer>"):
        assert judge(score_exact, task, text, entry) == 1.0
        assert judge(score_partial, task, text, entry) == {"score": 1.0, "malformed": 0.0}


def test_exact_pays_nothing_for_the_answer_inside_a_longer_text_and_partial_does():
    entry = entry_of("chain_sum")
    longer = f"= {entry['answer']} x"
    assert judge(score_exact, "chain_sum", longer, entry) == 0.0
    assert 0.0 < judge(score_partial, "chain_sum", longer, entry)["score"] < 1.0
    assert judge(score_exact, "chain_sum", "", entry) == 0.0


def test_nothing_is_right_where_there_is_nothing_to_compare_with():
    for text in ("", "4"):
        with pytest.raises(ValueError, match="no ground truth"):
            score_exact("chain_sum", text, " ", {})


def test_another_right_answer_counts_where_there_are_several():
    entry = {"question": "", "answer": "2*3 + 4", "metadata": {"numbers": [2, 3, 4], "target": 10}}
    assert judge(score_exact, "countdown", "4 + 3*2", entry) == 1.0
    assert judge(score_exact, "countdown", "3 + 4*2", entry) == 0.0
    assert judge(score_exact, "countdown", "((", entry) == 0.0


def test_malformed_answers_are_wrong_and_seen_and_broken_scorers_are_errors():
    entry = entry_of("prime_factorization")
    assert judge(score_partial, "prime_factorization", "two times x", entry) == {"score": 0.0, "malformed": 1.0}
    broken = {"question": "", "answer": "1 days", "metadata": {}}
    with pytest.raises(KeyError, match="task_type"):
        judge(score_partial, "time_intervals", "x", broken)
    with pytest.raises(ValueError, match="'no_such_task' not registered"):
        judge(score_partial, "no_such_task", "1", entry)


def request(task, text, entry):
    return RewardRequest(task, text, entry["answer"], entry=entry)


def test_exact_scores_in_a_worker():
    entry = entry_of("chain_sum")
    with closing(RewardFunction.reasoning_gym(ReasoningScoring.EXACT, ["chain_sum"], timeout_s=30.0)) as function:
        texts = [entry["answer"], "no", f"<answer>{entry['answer']}</answer>"]
        assert function.score([request("chain_sum", text, entry) for text in texts]).scores.tolist() == [1.0, 0.0, 1.0]


def test_partial_scores_in_a_worker_with_its_extras_and_a_limit():
    entry = {"question": "", "answer": "2*3 + 4", "metadata": {"numbers": [2, 3, 4], "target": 10}}
    factors = entry_of("prime_factorization")
    rows = [
        request("countdown", "4 + 3*2", entry), request("countdown", "9**9**9**9", entry),
        request("prime_factorization", "x", factors), RewardRequest("countdown", "4", "4"),
    ]  # fmt: skip
    tasks = ["countdown", "prime_factorization"]
    with closing(RewardFunction.reasoning_gym(ReasoningScoring.PARTIAL, tasks, timeout_s=4.0)) as function:
        result = function.score(rows)
    assert result.scores[[0, 2]].tolist() == [1.0, 0.0]
    assert result.extras[2] == {"malformed": 1.0}
    kinds = [fault.kind if fault else None for fault in result.row_faults]
    assert kinds == [None, FaultKind.TIMED_OUT, None, FaultKind.RAISED]
    assert "'entry'" in result.row_faults[3].message


@pytest.mark.parametrize("task", sorted(LISTS | EXPRESSIONS))
def test_no_text_of_a_model_is_run_as_code(task, tmp_path):
    entry, file = entry_of(task), tmp_path / "written"
    for text in (f"open({str(file)!r}, 'w')", f"[open({str(file)!r}, 'w') for _ in (1,)]",
                 f"__import__('pathlib').Path({str(file)!r}).touch()", f"1 + 0*len(open({str(file)!r}, 'w').name)"):
        judged = judge(score_partial, task, text, entry)
        assert judged["score"] < 0.1 and not file.exists()
    assert judge(score_partial, task, entry["answer"], entry)["score"] == 1.0


def test_answers_that_are_lists_or_expressions_still_count():
    entry = entry_of("spiral_matrix")
    assert judge(score_partial, "spiral_matrix", str(entry["answer"].split()), entry)["score"] == 0.1
    for plain in ("2*(3 + 4) - 10/5", "x**2/2 + C", "log(x)*sin(2*x)", "3.5*x^2", "-7"):
        assert may_be_scored("countdown", plain), plain
    for code in ("x.diff()", "2 .real", "lambda: 1", "[1]", "'a'", "a_b", "open(1)", "f = 2", "1;2",
                 "(" * 2001, "1" * 1999 + "!"):
        assert not may_be_scored("countdown", code), code
    assert may_be_scored("chain_sum", "open(1)")  # its scorer compares texts
