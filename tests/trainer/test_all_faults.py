"""Whatever is wrong with tasks, functions, models and tools is told in one error."""

from pathlib import Path

import pytest

from hybridflow.commands import generate, train
from hybridflow.data.reasoning import TaskSpec, build_reasoning_mix
from hybridflow.gathering import Gathering, InputFaults
from tests.trainer.runs import make_tokenizer, tiny_config


def told(work) -> list[str]:
    with pytest.raises(ValueError) as caught:
        work()
    return list(caught.value.faults) if isinstance(caught.value, InputFaults) else [str(caught.value)]


def test_faults_are_gathered_each_once():
    def refuse(*words: str) -> None:
        inner = Gathering()
        for word in words:
            inner.read(int, word)
        inner.finish()

    gathering = Gathering()
    assert [gathering.read(int, word) for word in ("1", "two")] == [1, None]
    gathering.read(refuse, "three", "two", "4")
    faults = told(gathering.finish)
    assert len(faults) == 2 and "'two'" in faults[0] and "'three'" in faults[1]
    assert str(pytest.raises(InputFaults, gathering.finish).value).splitlines() == ["2 faults", *(
        f"  {fault}" for fault in faults)]
    with pytest.raises(ValueError, match="^invalid literal"):
        refuse("one")
    Gathering().finish()


def test_unknown_tasks_are_told_together():
    faults = told(lambda: build_reasoning_mix((TaskSpec("chain_sums"), TaskSpec("gcd"), TaskSpec("gdc")), 8, 0, 0))
    assert len(faults) == 2 and "did you mean chain_sum" in faults[0] and "'gdc'" in faults[1]


def test_a_run_tells_all_that_is_wrong_with_what_it_reads(tmp_path: Path):
    broken = tmp_path / "broken.py"
    broken.write_text("raise RuntimeError('not today')\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    parts = f"[{{name: a, function: '{broken}:f'}}, {{name: b, function: '{__file__}:nowhere'}}, " \
            f"{{name: c, model: '{model}'}}]"
    config = tiny_config(make_tokenizer(tmp_path), tmp_path, (
        "data.tasks=[{name: chain_sums}]", "reward.function=null", f"reward.mixture={parts}", "generation.stop=[999]",
        f"algorithm.advantage={broken}:f", f"algorithm.policy_loss={__file__}:told", f"model.critic.path={model}",
        f"tools.file={broken}"))
    faults = told(lambda: train.prepare(config))
    starts = ["unknown reasoning-gym task 'chain_sums'", "algorithm.advantage = ", "algorithm.policy_loss = ",
              "model.critic.path = ", "reward.mixture[0].function = ", "reward.mixture[1].function = ",
              "reward.mixture[2].model = ", "tools.file = ", "generation.stop 999"]
    assert len(faults) == len(starts), faults
    assert all(fault.startswith(start) for fault, start in zip(faults, starts)), faults


def test_generate_tells_all_that_is_wrong_too(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_text("no model")
    config = tiny_config(tmp_path / "tokenizer.model", tmp_path, ("data.tasks=[{name: chain_sums}]",))
    starts = [f"--out {tmp_path}: is a folder", "unknown reasoning-gym task 'chain_sums'", f"{tmp_path}"]
    faults = told(lambda: generate.prepare(config, out=tmp_path))
    assert len(faults) == 3 and all(fault.startswith(start) for fault, start in zip(faults, starts)), faults


def test_rows_are_held_against_the_rest_in_one_error(tmp_path: Path):
    config = tiny_config(make_tokenizer(tmp_path), tmp_path, (
        "reward.function=null", f"reward.mixture=[{{name: a, function: '{__file__}:score', data_sources: [sums]}}]",
        "data.max_prompt_length=2"))
    faults = told(lambda: train.prepare(config))
    assert faults[0].startswith("reward.mixture: 'sums': no row has that data source") and len(faults) == 3
    assert all("more than data.max_prompt_length = 2" in fault for fault in faults[1:])


def score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def test_without_a_tokenizer_the_rest_is_told_all_the_same(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_text("no model")
    config = tiny_config(tmp_path / "tokenizer.model", tmp_path, (f"algorithm.advantage={__file__}:told",
                                                                  f"reward.function={__file__}:nowhere"))
    faults = told(lambda: train.prepare(config))
    assert len(faults) == 3 and "tokenizer.model" in faults[0]
    assert faults[2].startswith("reward.function = ") and "has no function 'nowhere'" in faults[2]
