"""Reward functions of users, run for real. Case 24 of the public cases is here."""

import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.records import FaultKind, RewardRequest
from tests.ranks import run_ranks

FUNCTIONS = Path(__file__).with_name("functions.py")
LIMIT_S = 1.0


def load(name, timeout_s=30.0, **settings):
    return closing(RewardFunction.load(f"{FUNCTIONS}:{name}", timeout_s=timeout_s, **settings))


def rows(*solutions, truth="yes"):
    return [RewardRequest("test", solution, truth, {"index": i}) for i, solution in enumerate(solutions)]


def numbers(result):
    """The scores, None where there is none."""
    return [None if score != score else score for score in result.scores.tolist()]


def check_case_24(function):
    start = time.monotonic()
    result = function.score(rows("yes", "raise", "spin", "nan", "no"))
    assert time.monotonic() - start < LIMIT_S + 2.0
    assert numbers(result) == [1.0, None, None, None, 0.0]
    kinds = [fault.kind if fault else None for fault in result.row_faults]
    assert kinds == [None, FaultKind.RAISED, FaultKind.TIMED_OUT, FaultKind.NOT_FINITE, None]
    assert result.row_faults[1].message == "RuntimeError: no number in the text (functions.py line 13)"


def test_case_24_and_again_off_the_main_thread():
    failures = []

    def off_the_main_thread():
        try:
            check_case_24(function)
        except BaseException as error:
            failures.append(error)

    with load("score", timeout_s=LIMIT_S) as function:
        check_case_24(function)
        thread = threading.Thread(target=off_the_main_thread)
        thread.start()
        thread.join()
        assert not failures
        assert function.score(rows("yes", "no")).scores.tolist() == [1.0, 0.0]


def test_one_worker_alone_runs_every_row():
    with load("score", timeout_s=LIMIT_S, num_workers=1) as function:
        result = function.score(rows("yes", "raise", "spin", "nan", "no"))
    assert numbers(result) == [1.0, None, None, None, 0.0]
    assert [fault and fault.kind for fault in result.row_faults] == [
        None, FaultKind.RAISED, FaultKind.TIMED_OUT, FaultKind.NOT_FINITE, None]


def test_slow_rows_run_side_by_side(tmp_path: Path):
    with load("meets", timeout_s=100.0) as function:  # one after another, each would wait in vain
        assert numbers(function.score(rows(*["4"] * 4, truth=str(tmp_path)))) == [1.0] * 4


def test_the_user_is_told_the_first_fault():
    with load("score") as function:
        requests = rows("yes", "raise", "nan")
        assert function.score(requests).fault_sentence(requests) == (
            "2 of 3 rewards failed (1 raised, 1 not_finite); first: row 1 of data source 'test': RuntimeError: "
            "no number in the text (functions.py line 13)"
        )


def test_what_counts_as_a_score():
    with load("odd") as function:
        result = function.score(rows("int", "bool", "dict"))
        assert result.scores.tolist() == [2.0, 1.0, 0.5] and not result.faults
        assert result.extras == ({}, {}, {"format": 1, "note": "fine", "what": "[1]"})
        bad = function.score(rows("text", "none", "list", "bad dict", "text dict", "inf", "nan dict", "huge"))
        assert bad.faults == {FaultKind.WRONG_TYPE: 5, FaultKind.NOT_FINITE: 3}
        assert numbers(bad) == [None] * 8 and "1e+30, beyond 1e+18" in bad.row_faults[7].message
        assert "not the str '1.0'" in bad.row_faults[0].message
        assert "{'reward': 1.0}" in bad.row_faults[3].message


def test_violence_is_counted_and_hurts_nobody_else():
    with load("violent", timeout_s=2.0) as function:
        result = function.score(rows("a", "exit", "b", "die", "c", "killed", "d", "deep", "regex", "sleep", "e"))
        assert result.faults == {FaultKind.RAISED: 2, FaultKind.CRASHED: 2, FaultKind.TIMED_OUT: 2}
        assert [i for i, fault in enumerate(result.row_faults) if fault is None] == [0, 2, 4, 6, 10]
        assert result.row_faults[1].message.startswith("SystemExit: 0")
        assert result.row_faults[3].message == "the process of the reward function ended with status 7"
        assert result.row_faults[5].message == "the process of the reward function ended with status -9"


def test_one_worker_lives_from_call_to_call_and_is_replaced_when_it_dies():
    with load("worker_id") as function:
        first = set(function.score(rows("a", "b")).scores.tolist()) | set(function.score(rows("c")).scores.tolist())
        assert len(first) == 1
        after = function.score(rows("die", "a"))
        assert after.faults == {FaultKind.CRASHED: 1} and after.scores[1].item() not in first
        function.close()
        assert not function.score(rows("a")).faults  # starts afresh


def test_a_worker_that_died_between_calls_costs_no_row():
    with load("worker_id") as function:
        pid = int(function.score(rows("a")).scores[0])
        subprocess.run(["kill", "-9", str(pid)], check=True)
        time.sleep(0.2)
        result = function.score(rows("a"))
        assert not result.faults and result.scores[0] != pid


def test_functions_may_use_signals_and_take_keywords():
    with load("with_alarm") as function:
        assert function.score(rows("x")).scores.tolist() == [0.75]
    with load("by_keywords") as function:
        assert function.score(rows("x", "y", "z")).scores.tolist() == [0.0, 1.0, 2.0]
        assert function.score([]).scores.shape == (0,)


@pytest.mark.parametrize(
    "name, message",
    [
        ("scor", r"has no function 'scor'; did you mean 'score'\?"),
        ("zzz", "has no function 'zzz'; it has score, odd"),
        ("positional", "positional.source, solution, truth, info. .* does not take the keywords data_source, solution"),
        ("too_many", "does not take the keywords .*: missing a required argument: 'tokenizer'"),
        ("asynchronous", "'asynchronous' .* is not a plain function"),
        ("os", "'os' .* is not a plain function"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_at_load(name, message):
    with pytest.raises(ValueError, match=message):
        load(name)


@pytest.mark.parametrize("spec", ["file.py", "file:score", "file.py:", "file.py:not a name", ""])
def test_the_form_of_the_spec(spec):
    with pytest.raises(ValueError, match="is not file.py:function"):
        RewardFunction.load(spec, timeout_s=1.0)


def test_files_that_are_missing_or_do_not_import(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"no file {tmp_path}/nothing.py"):
        RewardFunction.load("nothing.py:score", timeout_s=1.0)
    (tmp_path / "broken.py").write_text("import no_such_library\n")
    with pytest.raises(
        ValueError, match="broken.py does not import: ModuleNotFoundError: No module named 'no_such_lib"
    ):
        RewardFunction.load("broken.py:score", timeout_s=1.0)
    (tmp_path / "quits.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(ValueError, match="ended with status 3 while loading"):
        RewardFunction.load("quits.py:score", timeout_s=1.0)
    with pytest.raises(ValueError, match="timeout_s is 0"):
        load("score", timeout_s=0.0)


def test_a_function_that_cannot_be_loaded_again_is_told_to_whoever_collects(tmp_path):
    file = tmp_path / "once.py"
    file.write_text(FUNCTIONS.read_text())
    with closing(RewardFunction.load(f"{file}:violent", timeout_s=30.0)) as function:
        file.write_text("import no_such_library\n")
        function.submit("dies", rows("die")[0])
        assert function.collect(["dies"])["dies"].kind is FaultKind.CRASHED
        for _ in range(2):
            with pytest.raises(ValueError, match="does not import"):
                function.score(rows("a", "b"))
        function.submit("later", rows("a")[0])
        with pytest.raises(ValueError, match="does not import"):
            function.collect()
        file.write_text(FUNCTIONS.read_text())
        function.close()
        assert not function.score(rows("a")).faults


SCRIPT = """
from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.records import RewardRequest
import os, threading
function = RewardFunction.load("main.py:score", timeout_s=30.0)
print(int(function.score([RewardRequest("x", "y", "z")]).scores[0]), flush=True)
threading.Thread(target=function.score, args=([RewardRequest("x", "spin", "z")],), daemon=True).start()
threading.Event().wait(0.5)
os._exit(0)
"""
MAIN = """
import os
from neighbour import TRUTH
def score(data_source, solution_str, ground_truth, extra_info):
    while solution_str == "spin":
        pass
    return os.getpid()
"""


def test_a_script_without_a_main_guard_works_and_leaves_no_process_behind(tmp_path):
    (tmp_path / "main.py").write_text(MAIN)
    (tmp_path / "neighbour.py").write_text("TRUTH = 1\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    root = str(FUNCTIONS.parents[2])
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": root},
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    status = Path(f"/proc/{int(done.stdout)}/stat")
    for _ in range(100):  # it spins, and its owner is gone without a word
        if not status.exists() or ") Z " in status.read_text():  # Z: dead, and nobody has asked after it
            return
        time.sleep(0.1)
    pytest.fail("the worker outlives its owner")


def score_on_a_rank(world):
    with load("score", timeout_s=LIMIT_S) as function:
        return numbers(function.score(rows("yes", "spin", "no")))


def test_every_rank_has_its_own_worker():
    assert run_ranks(2, score_on_a_rank) == [[1.0, None, 0.0]] * 2


def test_the_file_is_not_run_in_the_process_of_the_rank():
    with load("score") as function:
        assert function.score(rows("yes")).scores.tolist() == [1.0]
    assert not [name for name in sys.modules if "reward_file" in name]
