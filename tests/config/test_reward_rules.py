"""The reward block: actions by cause, mixtures, and which models have layouts."""

import json
from pathlib import Path

import pytest

from hybridflow.config.batch_math import layout_table
from hybridflow.config.command import Command
from hybridflow.config.faults import ConfigError
from hybridflow.config.layouts import Role, roles
from hybridflow.config.reward_rules import is_decoder_folder
from hybridflow.config.validate import validate
from tests.config.builders import config

RIGHT = "{name: right, reasoning_gym: exact}"
SHORT = "{name: short, function: a.py:f}"


def faults(*overrides: str, command: Command = Command.TRAIN, **settings) -> dict[str, str]:
    return {fault.key: str(fault) for fault in validate(config(*overrides, **settings), 1, command)}


@pytest.mark.parametrize("action", ["drop", "zero", "error", "0", "-1", "0.5"])
def test_actions(action: str):
    assert faults(f"reward.on_fault.raised={action}") == {}


@pytest.mark.parametrize(("action", "choice"), [("dorp", "did you mean drop?"), ("ignore", "choose drop, zero, error"),
                                                (".nan", "choose a finite number"), (".inf", "choose a finite number")])
def test_what_is_no_action(action: str, choice: str):
    message = faults(f"reward.on_fault.timed_out={action}")["reward.on_fault.timed_out"]
    assert choice in message
    key = "reward.mixture[0].on_fault.timed_out"
    part = f"{{name: right, reasoning_gym: exact, on_fault: {{timed_out: {action}}}}}"
    assert choice in faults(f"reward.mixture=[{part}]")[key]


def test_null_is_no_action():
    with pytest.raises(ConfigError, match="is not a text, an integer or a number"):
        config("reward.on_fault.raised=null")


def test_a_mixture():
    assert faults(f"reward.mixture=[{RIGHT}, {SHORT}]") == {}
    assert faults(f"reward.mixture=[{RIGHT}, {{name: text, weight: -0.5, model: m}}]",
                  "model.reward_model.micro_batch_size=2") == {}
    both = "{name: a-b, function: a.py:f, reasoning_gym: exact}, {name: a b, weight: .nan}, {name: x, weight: 0}"
    found = faults(f"reward.mixture=[{both}]")
    assert set(found) == {"reward.mixture[0]", "reward.mixture[1].name", "reward.mixture[1].weight",
                          "reward.mixture[1]", "reward.mixture[2]"}
    for weight in ("1e308", "-1e7"):
        found = faults(f"reward.mixture=[{RIGHT}, {{name: x, weight: {weight}, function: a.py:f}}]")
        assert set(found) == {"reward.mixture[1].weight"}
    twice = faults(f"reward.mixture=[{RIGHT}, {RIGHT}]")
    assert set(twice) == {"reward.mixture[0].name", "reward.mixture[1].name"}
    assert "reward.mixture" in faults("reward.mixture=[{name: x, weight: 0, function: a.py:f}]")
    assert "names one twice" in faults(
        "reward.mixture=[{name: x, function: a.py:f, data_sources: [chain_sum, chain_sum]}]"
    )["reward.mixture[0].data_sources"]


def test_every_task_has_a_part():
    tasks = "data.tasks=[{name: chain_sum}, {name: gcd}]"
    sums = "{name: sums, function: a.py:f, data_sources: [chain_sum]}"
    assert "no part scores the task gcd" in faults(tasks, f"reward.mixture=[{sums}]")["reward.mixture"]
    assert faults(tasks, f"reward.mixture=[{sums}, {RIGHT}]") == {}
    wrong = "{name: sums, function: a.py:f, data_sources: [chain_sums]}"
    assert "did you mean chain_sum?" in faults(f"reward.mixture=[{wrong}, {RIGHT}]")["reward.mixture[0].data_sources"]


def test_prompts_from_files_have_no_scorer_of_tasks():
    tree = {"model": {"path": "folder"}, "data": {"source": "jsonl", "train_files": ["a"]}}
    assert set(faults(f"reward.mixture=[{RIGHT}]", tree=tree)) == {"reward.mixture[0].reasoning_gym"}
    assert faults(f"reward.mixture=[{SHORT}]", tree=tree) == {}


def test_a_mixture_of_tasks_and_files_routes_its_tasks():
    data = {"source": "mixture", "mixture": [{"files": ["a"]}, {"task": "gcd"}]}
    tree = {"model": {"path": "folder"}, "data": data}
    gcd = "{name: right, reasoning_gym: exact, data_sources: [gcd]}"
    maths = "{name: maths, function: a.py:f, data_sources: [maths]}"  # what rows of the file may say
    assert faults(f"reward.mixture=[{gcd}, {maths}]", tree=tree) == {}
    assert set(faults(f"reward.mixture=[{RIGHT}, {maths}]", tree=tree)) == {"reward.mixture[0].data_sources"}
    assert "no part scores the task gcd" in faults(f"reward.mixture=[{maths}]", tree=tree)["reward.mixture"]
    data["mixture"].pop(0)
    assert "is no task of the data" in faults(f"reward.mixture=[{gcd}, {maths}]", tree=tree)[
        "reward.mixture[1].data_sources"]
    assert faults(f"reward.mixture=[{RIGHT}]", tree=tree) == {}


def test_who_answers_no_held_out_prompt_has_no_reward():
    tree = {"model": {"path": "folder"}, "data": {"source": "jsonl", "train_files": ["a"]}}
    assert "reward.mixture" in faults(f"reward.mixture=[{SHORT}]", tree=tree, command=Command.REWARD_MODEL)
    assert faults(f"reward.mixture=[{SHORT}]", tree=tree, command=Command.DPO) == {}
    assert "reward.mixture[0]" in faults("reward.mixture=[{name: a}]", tree=tree, command=Command.EVALUATE)


def test_a_mixture_with_a_model_has_its_role():
    assert Role.REWARD in roles(config("reward.mixture=[{name: a, model: m}]"))
    assert Role.REWARD not in roles(config(f"reward.mixture=[{SHORT}]"))
    idle = faults("reward.mixture=[{name: a, model: m}]", "reward.timeout_s=3", "reward.on_fault.raised=zero",
                  "reward.on_fault.not_finite=zero")
    assert set(idle) == {"reward.timeout_s", "reward.on_fault.raised"}
    assert set(faults("model.reward_model.path=m", "reward.on_fault.not_finite=error")) == set()


def test_the_kind_of_a_model_is_read_off_its_folder(tmp_path: Path):
    for model_type, decoder in (("llama", True), ("qwen3", True), ("deberta-v2", False), ("gpt2", False)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        assert is_decoder_folder(tmp_path) == decoder
        read = config(f"model.reward_model.path={tmp_path}")
        row = layout_table(read, 4).splitlines()[-1]
        assert row.startswith("reward " if decoder else "1 text classifier ")
        assert row.endswith("train.layout" if decoder else "whole on each rank")
        assert (Role.REWARD in roles(read)) == decoder
    (tmp_path / "config.json").write_text("[")
    assert is_decoder_folder(tmp_path)  # who reads it as one says what is wrong
