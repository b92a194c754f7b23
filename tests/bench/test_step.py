"""`bench step`: what a step must do at least, whose gradients are compared how, and that our side runs in a process."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridflow.bench import generate_case, generate_floor, step, step_case, step_race
from hybridflow.bench.generate_case import MODELS
from hybridflow.bench.generate_process import ContestantError
from hybridflow.bench.step_case import Work, least_work
from hybridflow.bench.step_options import TRL_PYTHON, Options, add_arguments
from hybridflow.bench.step_race import (
    OURS,
    TRL,
    OtherGradientsError,
    Result,
    Times,
    check,
    largest_difference,
    work_of,
)
from hybridflow.cli import parser


def test_least_work_by_hand():
    """A model of one weight in its layers and one in its head, and of one multiplication for each pair."""
    tokens, targets = 4 * 32 + 32 * 63, 32 * 64
    pairs = 4 * 32 * 33 / 2 + 32 * 63 * 64 / 2 + 32 * 63 * 32
    grpo = least_work("grpo", 1, 0, 0)
    assert (grpo.generate, grpo.score, grpo.update, grpo.total) == (2 * tokens, 0, 6 * tokens, 8 * tokens)
    assert least_work("grpo", 0, 1, 0).update == 6 * targets and least_work("grpo", 0, 0, 1).generate == 2 * pairs
    ppo = least_work("ppo", 1, 1, 0)
    assert (ppo.score, ppo.update) == (2 * (tokens + targets), 12 * tokens + 6 * targets)
    work = work_of("grpo", MODELS["tiny"])
    assert work.generate == least_work("grpo", 8 * (256 * (2 * 256 + 2 * 128) + 3 * 256 * 704), 4096 * 256,
                                       8 * 2 * 8 * 32).generate


def test_prompts_rewards_and_words():
    assert step_case.prompts(1) == step_case.prompts(1) != step_case.prompts(2)
    assert [len(row) for row in step_case.prompts(1)] == [32] * 4
    assert [len(row) for row in step_case.responses(-1)] == [64] * 32
    assert step_case.score_text(step_case.text_of([2, 3, 4, 4])) == step_case.score_ids([2, 3, 4, 4]) == 0.75


def test_options_are_read():
    def read(*words: str) -> Options:
        return Options.of(parser().parse_args(["bench", "step", *words]))

    assert replace(read(), trl_python=None, trl_ppo_python=None) == Options()
    some = read("--algorithms", "ppo", "--rounds", "2", "--trl-ppo-python", "there", "--json", "x.json")
    assert (some.algorithms, some.rounds, some.peer_python("ppo"), some.json) == (("ppo",), 2, "there", Path("x.json"))
    given = argparse.ArgumentParser()
    add_arguments(given, {TRL_PYTHON: "/there/python"})
    assert Options.of(given.parse_args([])).peer_python("grpo") == "/there/python"
    with pytest.raises(SystemExit):
        read("--algorithms", "dpo")


def test_gradients_are_compared_by_model():
    ours = {"policy.a": torch.tensor([3.0, 4.0]), "critic.b": torch.tensor([[1.0]])}
    scale = (1 - 1 / 2048) ** 0.5
    theirs = {"policy.a": ours["policy.a"] * scale, "critic.b": torch.tensor([[1.25]])}
    assert largest_difference(ours, theirs, "ppo") == pytest.approx(0.2)
    clipped = {"policy.a": torch.tensor([0.6, 0.8])}
    assert largest_difference({"policy.a": ours["policy.a"]}, clipped, "grpo") < 1e-6
    with pytest.raises(OtherGradientsError, match="only one of the two trains critic.b"):
        largest_difference(ours, clipped, "ppo")


class Writer:
    """A contestant with this gradient."""

    def __init__(self, value: float) -> None:
        self.value = value

    def call(self, method: str, path: str) -> None:
        save_file({"policy.a": torch.tensor([0.5, self.value])}, path)


def test_who_learns_something_else_has_no_times(tmp_path: Path):
    assert check("grpo", {OURS: Writer(0.5), TRL: Writer(0.5)}, tmp_path) == 0
    for other in (0.6, float("nan")):
        with pytest.raises(OtherGradientsError, match="on the same rollouts differ by"):
            check("grpo", {OURS: Writer(0.5), TRL: Writer(other)}, tmp_path)


def test_a_result_is_told_and_judged():
    told = step.rows(result(trl=4.2))
    assert [row[:2] for row in told] == [("grpo", "ours"), ("", "TRL"), ("", "floor")]
    assert told[0][5:] == ("2.000", "2.000", "16.0", "1.00x") and told[1][-1] == "2.10x" and told[2][5] == "1.000"
    assert step.missed(result(trl=4.0)) == []
    [fault] = step.missed(result(trl=3.9))
    assert "1.95 times the samples in a CPU second of TRL, not 2.0" in fault
    text = step.explained([result(trl=4.0)], Options(), 60.0)
    assert "TRL takes 2.00 times as long" in text and "2.00 times the floor at 100 GFLOP/s" in text
    alone = replace(result(), times={OURS: result().times[OURS]}, difference=None)
    assert step.missed(alone) == [] and TRL_PYTHON in step.explained([alone], Options(), 60.0)


def result(trl: float = 4.0) -> Result:
    """GRPO, in which we take 2 seconds."""
    times = {name: Times(({"generate": 0.5, "score": 0.0, "update": seconds - 0.5},) * 3, (seconds,) * 3)
             for name, seconds in ((OURS, 2.0), (TRL, trl))}
    return Result("grpo", times, 1e-6, 1e11, Work(2e10, 0.0, 8e10))


def test_our_side_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = replace(MODELS["tiny"], hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
                     head_dim=8, initializer_range=0.2)
    monkeypatch.setitem(generate_case.MODELS, "tiny", config)
    monkeypatch.setattr(generate_floor, "LEAST_S", 0.02)
    step_race.write_case(tmp_path)
    found = step_race.race("ppo", Options(rounds=1), tmp_path)
    [spent] = found.times[OURS].steps
    assert set(spent) == set(step_case.PHASES) and spent["generate"] > 0 < spent["update"]
    assert found.difference is None and found.flops > 0 and found.to_floor > 0


def test_our_gradients_are_written_by_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from hybridflow.bench.step_ours import Ppo

    config = replace(MODELS["tiny"], hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1,
                     head_dim=8)
    monkeypatch.setitem(generate_case.MODELS, "tiny", config)
    step_race.write_case(tmp_path)
    Ppo(str(tmp_path), "fp32", torch.get_num_threads()).gradients(str(tmp_path / "grads"))
    grads = load_file(tmp_path / "grads")
    assert {name.partition(".")[0] for name in grads} == {"policy", "critic"}
    assert grads["policy.lm_head.weight"].shape == (4096, 16) and grads["critic.value_head.weight"].shape == (1, 16)
    assert all(grad.abs().sum() > 0 for grad in grads.values())


def test_a_peer_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    step_race.write_case(tmp_path)
    with pytest.raises((ContestantError, OSError)):
        step_race.race("grpo", Options(trl_python=str(tmp_path / "none")), tmp_path)
