"""Rules of the data and the evaluation block, each with a value that would work."""

import pytest

from hybridflow.config.command import Command
from hybridflow.config.files import missing_files
from tests.config.builders import config
from tests.config.test_validate import faults

MIXED = ["data.source=mixture", "reward.function=a.py:f"]


@pytest.mark.parametrize(("mixture", "key"), [
    ("[]", "data.mixture"),
    ("[{}]", "data.mixture[0]"),
    ("[{task: gcd}, {task: gcd, files: [a]}]", "data.mixture[1]"),
    ("[{task: gcd, weight: 0}]", "data.mixture[0].weight"),
    ("[{files: [a], weight: .inf}]", "data.mixture[0].weight"),
    ("[{task: gcd, weight: 1e308}]", "data.mixture[0].weight"),
    ("[{task: gcd, weight: 1e-320}]", "data.mixture[0].weight"),
    ("[{task: gcd, size: 0}]", "data.mixture[0].size"),
    ("[{task: gcd, size: 4000000000}]", "data.mixture[0].size"),
    ("[{files: [a], template: x}]", "data.mixture[0].template"),
    ("[{files: [a], size: 5}]", "data.mixture[0].size"),
    ("[{files: [a], config: {x: 1}}]", "data.mixture[0].config"),
])
def test_a_source_of_a_mixture_is_files_or_a_task(mixture, key):
    assert list(faults(1, *MIXED, f"data.mixture={mixture}")) == [key]


def test_preferences_are_of_one_source():
    found = faults(1, "data.source=mixture", "data.mixture=[{files: [a]}]", command=Command.KTO)
    assert set(found) == {"data.source", "data.mixture"}


def test_a_mixture_needs_a_judge_for_its_files_and_prompts_to_answer():
    tree = {"model": {"path": "folder"}, "data": {"source": "mixture", "mixture": [{"files": ["a"]}, {"task": "gcd"}]}}
    assert set(faults(1, tree=tree)) == {"reward.function"}
    judged = "reward.function=a.py:f"
    assert faults(1, judged, tree=tree) == {}
    assert set(faults(1, judged, tree=tree, command=Command.GENERATE)) == {"data.test_files"}
    for held_out in ("data.test_files=[b]", "data.test_tasks=[{name: gcd}]"):
        assert faults(1, judged, held_out, tree=tree, command=Command.EVALUATE) == {}
    assert set(faults(1, judged, "data.test_tasks=[{name: gcd, weight: -1}]", tree=tree)) == {
        "data.test_tasks[0].weight"}
    tasks = {"model": {"path": "folder"}, "data": {"source": "mixture", "mixture": [{"task": "gcd"}]}}
    assert faults(1, tree=tasks) == faults(1, "data.prompt_template='{question}'", tree=tasks) == {}
    assert set(faults(1, judged, "data.prompt_template=x", "data.test_size=5",
                      tree={"data": {"source": "mixture", "mixture": [{"files": ["a"]}]}, "model": {"path": "b"}})) == {
        "data.prompt_template", "data.test_size"}


def test_evaluation_needs_held_out_prompts():
    tree = {"model": {"path": "folder"}, "data": {"source": "jsonl", "train_files": ["a"]}}
    asked = ("reward.function=a.py:f", "evaluation={every_steps: 3, prompts: 5, temperature: 1.0}")
    keys = {"evaluation.every_steps", "evaluation.prompts", "evaluation.temperature"}
    assert set(faults(1, *asked, tree=tree)) == keys
    assert faults(1, *asked, "data.test_files=[b]", tree=tree) == {}
    assert faults(1, asked[0], "evaluation.every_steps=null", tree=tree) == {}
    mixed = {"model": {"path": "folder"}, "data": {"source": "mixture", "mixture": [{"task": "gcd"}]}}
    assert set(faults(1, asked[1], tree=mixed)) == keys
    few = ("data.test_tasks=[{name: gcd}]", "data.test_size=4")
    assert "choose 4 or less" in faults(1, asked[1], *few, tree=mixed)["evaluation.prompts"]
    assert faults(1, asked[1], *few, "data.test_files=[b]", tree=mixed) == {}
    assert "sft.stop_at_accuracy" in faults(1, "sft.stop_at_accuracy=0.5", tree=tree, command=Command.SFT)


def test_streaming_is_of_files():
    tree = {"model": {"path": "folder"}, "data": {"source": "jsonl", "train_files": ["a"]}}
    keys = ["reward.function=a.py:f", "data.streaming=true"]
    assert faults(1, *keys, "data.shuffle_buffer=5", tree=tree) == {}
    assert set(faults(1, *keys, "data.shuffle_buffer=5", "data.shuffle=false", tree=tree)) == {"data.shuffle_buffer"}
    assert set(faults(1, *keys, "data.source=mixture", "data.train_files=[]", "data.mixture=[{task: gcd}]",
                      tree=tree)) == {"data.streaming"}
    assert set(faults(1, "data.streaming=true", "sft.tokenizer_vocab_size=300", tree=tree, command=Command.SFT)) == {
        "sft.tokenizer_vocab_size"}


def test_several_answers_need_a_temperature():
    many = "evaluation.samples_per_prompt=4"
    assert "would be the same" in faults(1, many)["evaluation.temperature"]
    assert faults(1, many, "evaluation={temperature: 1.0, top_k: 5, top_p: 0.9, min_p: 0.1, save_answers: true}") == {}
    assert set(faults(1, "evaluation.every_steps=null", "evaluation.save_answers=true")) == {"evaluation.save_answers"}


def test_evaluating_needs_prompts_a_judge_and_a_layout_for_it():
    tree = {"model": {"path": "folder"}, "data": {"source": "jsonl", "train_files": ["a"]}}
    asked = {"tree": tree, "command": Command.EVALUATE}
    assert set(faults(1, **asked)) == {"data.test_files", "reward.function"}
    whole = ("data.test_files=[b]", "reward.function=a.py:f")
    assert faults(1, *whole, **asked) == faults(4, *whole, "train.layout.tp=8", **asked) == {}
    model = ("data.test_files=[b]", "model.reward_model.path=r")
    assert faults(4, *model, **asked) == {}
    assert "cannot be cut in replicas of 3" in faults(4, *model, "model.reward_model.layout.tp=3", **asked)[
        "model.reward_model.layout"]
    assert "evaluation.temperature" in faults(1, *whole, "evaluation.samples_per_prompt=2", **asked)


def test_files_of_mixtures_and_templates_must_be_there():
    tree = {"model": {"path": "m"}, "data": {"source": "mixture", "chat_template": "chat.jinja",
                                             "mixture": [{"task": "gcd"}, {"files": [__file__, "b"]}]}}
    found = missing_files(config(tree=tree), Command.TRAIN)
    assert [fault.key for fault in found] == ["model.path", "data.mixture[1].files[1]", "data.chat_template"]
    assert {fault.key for fault in missing_files(config(tree=tree), Command.COMPLETE)} == {
        "model.path", "data.chat_template"}
    judged = config("model.reward_model.path=r", "reward.function=f.py:g", tree=tree)
    assert {"model.reward_model.path", "reward.function"} <= {
        fault.key for fault in missing_files(judged, Command.EVALUATE)}
