"""Rewards that hide processes, take memory, spoil what they stand on, or return what is no number."""

import os
import time
from contextlib import closing
from pathlib import Path

import pytest

from hybridflow.rewards import keeper
from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.records import FaultKind, RewardRequest

FUNCTIONS = Path(__file__).with_name("unruly.py")
HIDDEN = ["forks", "own session", "daemonises", "program"]


def load(name, timeout_s=30.0, **settings):
    return closing(RewardFunction.load(f"{FUNCTIONS}:{name}", timeout_s=timeout_s, **settings))


def rows(*solutions, truth=""):
    return [RewardRequest("test", solution, str(truth)) for solution in solutions]


def require_end(pid: int) -> None:
    """The process is gone, or a zombie that its parent has not asked after, before a minute has passed."""
    status = Path(f"/proc/{pid}/stat")
    for _ in range(600):
        try:
            if ") Z " in status.read_text():
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.1)
    os.kill(pid, 9)
    pytest.fail("the process outlives its reward")


@pytest.mark.parametrize("how", HIDDEN)
def test_what_a_reward_leaves_running_ends_when_its_worker_is_closed(how: str, tmp_path: Path):
    with load("hides") as function:
        assert not function.score(rows(how, truth=tmp_path / "pid")).faults
    require_end(int((tmp_path / "pid").read_text()))


def test_it_ends_when_its_reward_runs_too_long_or_dies(tmp_path: Path):
    files = [tmp_path / name for name in "abcdefgh"]
    hiding = [f"{how} and {ends}" for how in HIDDEN for ends in ("spins", "dies")]
    with load("hides", timeout_s=4.0) as function:
        result = function.score([row for how, file in zip(hiding, files) for row in rows(how, truth=file)])
        assert [fault.kind for fault in result.row_faults] == [FaultKind.TIMED_OUT, FaultKind.CRASHED] * len(HIDDEN)
        assert result.row_faults[1].message.endswith("status 3")
        for file in files:
            require_end(int(file.read_text()))


def test_an_idle_pool_burns_nothing_what_a_call_left_running_ends_with_the_call(tmp_path: Path):
    with load("hides") as function:
        worker = function.score(rows("forks", truth=tmp_path / "fork")).scores[0]
        require_end(int((tmp_path / "fork").read_text()))
        after = function.score(rows("daemonises", truth=tmp_path / "daemon")).scores[0]
        require_end(int((tmp_path / "daemon").read_text()))
        assert after != worker  # it was part of what ended
        assert not function.score(rows("clean")).faults


def test_what_is_ended_between_calls_costs_no_row_of_the_next(tmp_path: Path):
    with load("hides") as function:
        for number in range(5):
            result = function.score([*rows("forks", truth=tmp_path / str(number)), *rows("clean")])
            assert not result.faults, result.row_faults


def test_rewards_that_print_read_close_and_start_threads():
    names = ("prints", "reads", "reads at end", "threads", "returns twice", "raises in a fork", "closes its outputs",
             "interrupts", "recurses", "raises what has no text")
    with load("odd") as function:
        result = function.score(rows(*names))
        faults = {name: fault.message for name, fault in zip(names, result.row_faults) if fault is not None}
        assert set(result.faults) == {FaultKind.RAISED}
        assert set(faults) == {"reads", "interrupts", "recurses", "raises what has no text"}
        assert faults["reads"].startswith("EOFError") and faults["interrupts"].startswith("KeyboardInterrupt")
        assert faults["recurses"].startswith("RecursionError")
        assert [score for score in result.scores.tolist() if score == score] == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]


def test_a_reward_that_spoils_its_worker_is_counted_and_costs_no_other_row():
    names = ("a", "closes its socket", "b", "exits in a thread", "c", "writes into its socket", "d")
    with load("odd") as function:
        result = function.score(rows(*names))
    assert [fault and fault.kind for fault in result.row_faults] == [None, FaultKind.CRASHED] * 3 + [None]
    assert [fault.message for fault in result.row_faults if fault] == [
        "the function has closed the socket of its worker", "the process of the reward function ended with status 5",
        "it wrote to the socket of its worker"]


def test_memory_has_a_limit_of_its_own_kind_which_imports_do_not_count_in():
    names = ("bytes", "a", "list", "array", "b", "child")
    with load("hungry", timeout_s=150.0, memory_mb=512) as function:
        result = function.score(rows(*names))
    assert [fault and fault.kind for fault in result.row_faults] == [
        FaultKind.OUT_OF_MEMORY, None, FaultKind.OUT_OF_MEMORY, FaultKind.OUT_OF_MEMORY, None, None]
    assert result.scores[5] == 42.0  # a process that it forks has the limit, too
    assert result.row_faults[0].message.startswith("MemoryError")


def test_the_kernel_s_kill_is_told_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Leash:
        told = b""

        def sendall(self, line):
            self.told += line

    monkeypatch.setattr(keeper, "VMSTAT", tmp_path / "vmstat")
    assert keeper.oom_kills() == 0
    (tmp_path / "vmstat").write_text("nr_free_pages 3\noom_kill 2\n")
    kept = keeper.Keeper(Leash())
    kept._tell(-9)
    (tmp_path / "vmstat").write_text("nr_free_pages 3\noom_kill 3\n")
    for status in (-9, -11, 1):
        kept._tell(status)
    assert [b'"out_of_memory": true' in line for line in kept.leash.told.splitlines()] == [False, True, False, False]


def test_what_is_a_number():
    scores = {"float32": 0.5, "int64": 3.0, "bool_": 1.0, "0-d array": 0.25, "0-d tensor": 0.75, "bfloat16": 0.5,
              "dict": 0.5, "bool": 0.0}
    wrong = ("complex", "complex128", "1-d array", "list", "1-d tensor", "bytes", "text", "none", "class")
    infinite = ("nan array", "inf", "large", "nan tensor")
    with load("returns", timeout_s=150.0, memory_mb=700) as function:
        result = function.score(rows(*scores, *wrong, *infinite))
        assert function.score(rows("too large")).faults == {FaultKind.OUT_OF_MEMORY: 1}  # torch's own words for it
    assert result.scores[:len(scores)].tolist() == list(scores.values())
    assert result.extras[6] == {"seen": 2, "list": "[1]"}
    kinds = [fault and fault.kind for fault in result.row_faults]
    assert kinds == [None] * len(scores) + [FaultKind.WRONG_TYPE] * len(wrong) + [FaultKind.NOT_FINITE] * len(infinite)
