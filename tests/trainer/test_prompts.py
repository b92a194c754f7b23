"""The prompts of a config: held-out ones of the tasks that it names for tests, apart from training, short enough."""

import json
from pathlib import Path

import pytest

from hybridflow.config.load import load_config
from hybridflow.config.schema import Config
from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.parallel.world import World
from hybridflow.trainer.prompts import held_out_prompts, read_records, require_same
from tests.ranks import run_ranks
from tests.trainer.runs import make_tokenizer, tiny_config


def test_held_out_prompts_are_of_the_test_tasks(tmp_path: Path):
    test_tasks = "data.test_tasks=[{name: count_bits, config: {max_n: 300}, template: '{question}!'}]"
    records = read_records(tiny_config(tmp_path, tmp_path, (test_tasks,)))
    assert {record.data_source for record in records.train} == {"chain_sum"}
    assert {record.data_source for record in records.test} == {"count_bits"} and len(records.test) == 8
    assert all(record.prompt.endswith("!") for record in records.test)
    same = read_records(tiny_config(tmp_path, tmp_path))
    assert {record.data_source for record in same.test} == {"chain_sum"} and len(same.test) == 8


def files(folder: Path, train: list[str], test: list[str], *overrides: str) -> Config:
    """A config of prompts in two files."""
    for name, prompts in (("train", train), ("test", test)):
        rows = [{"data_source": "s", "prompt": prompt, "reward_model": {"ground_truth": "1"}} for prompt in prompts]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"source": "jsonl", "train_files": [f"{folder}/train.jsonl"], "test_files": [f"{folder}/test.jsonl"]}
    return load_config({"data": data}, overrides)


def test_a_file_of_held_out_prompts_must_not_hold_training_prompts(tmp_path: Path):
    assert len(read_records(files(tmp_path, ["1", "2", "2"], ["3"])).train) == 3
    told = r"2 of 3 training prompts are held-out .* \S*train.jsonl row 2 \(\S*test.jsonl row 2\)"
    with pytest.raises(ValueError, match=told):
        read_records(files(tmp_path, ["1", "2", "2"], ["3", "2"]))


def test_held_out_prompts_obey_the_longest_length(tmp_path: Path):
    tokenizer = open_tokenizer(make_tokenizer(tmp_path))
    drop = ("data.max_prompt_length=4", "data.overlong=drop", "evaluation.prompts=2")
    config = files(tmp_path, ["1"], ["3", "1 + 2 + 3 + 4", "4", "5"], *drop)
    records = read_records(config)
    asked = held_out_prompts(config, records, tokenizer, tokenizer.vocab_size)
    assert [(prompt.id, prompt.record.prompt) for prompt in asked] == [(0, "3"), (2, "4")]
    strict = load_config({}, ("data.max_prompt_length=4",))
    with pytest.raises(ValueError, match=r"test.jsonl row 2, has .* Set data.max_prompt_length"):
        held_out_prompts(strict, records, tokenizer, tokenizer.vocab_size)


def ranks_read(world: World, folder: str, prompts: list[str]) -> str:
    own = Path(folder) / str(world.rank)
    own.mkdir()
    try:
        records = read_records(files(own, [prompts[world.rank]], ["held out"]))
        require_same(world, (*records.train, *records.test))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_must_have_read_the_same(tmp_path: Path):
    for told in run_ranks(2, ranks_read, str(tmp_path), ["1", "2"]):
        assert told.startswith("ranks [1] have other prompts than rank 0: check that data files are the same")
