"""The prompts of a config: held-out ones of the tasks that it names for tests, apart from training, short enough."""

import json
from pathlib import Path

import pytest

from hybridflow.config.load import load_config
from hybridflow.config.schema import Config
from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.data.train_source import data_metrics
from hybridflow.parallel.world import World
from hybridflow.trainer.prompts import (
    held_out_prompts,
    read_records,
    require_same,
    require_same_data,
    training_pairs,
    training_prompts,
)
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


def write(path: Path, prompts: list[str], source: str = "s") -> str:
    rows = [{"data_source": source, "prompt": prompt, "reward_model": {"ground_truth": "1"}} for prompt in prompts]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


def mixture(folder: Path, *overrides: str) -> Config:
    """Three sources: a file, a task, and a file of the same name in another folder."""
    (folder / "b").mkdir(exist_ok=True)
    sources = [{"files": [write(folder / "sums.jsonl", ["10", "11", "12"])], "weight": 2.0},
               {"task": "count_bits", "config": {"max_n": 300}, "size": 5, "template": "{question}!"},
               {"files": [write(folder / "b" / "sums.jsonl", ["13", "14"])]}]
    data = {"source": "mixture", "mixture": sources, "prompts_per_step": 40, "test_size": 3,
            "test_files": [write(folder / "test.jsonl", ["15", "16"], "held")],
            "test_tasks": [{"name": "count_bits", "config": {"max_n": 300}}]}
    return load_config({"data": data}, overrides)


def test_no_two_sources_have_one_name(tmp_path: Path):
    (tmp_path / "b").mkdir()
    files = [write(tmp_path / name, ["10"]) for name in ("sums.jsonl", "sums_2.jsonl", "b/sums.jsonl")]
    data = {"source": "mixture", "mixture": [{"files": [file]} for file in files], "prompts_per_step": 40}
    sources = read_records(load_config({"data": data}, ())).sources
    assert [source.name for source in sources] == ["sums", "sums_2", "sums_3"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_mixture_of_files_and_tasks(tmp_path: Path, streaming: bool):
    tokenizer = open_tokenizer(make_tokenizer(tmp_path))
    config = mixture(tmp_path, f"data.streaming={str(streaming).lower()}")
    records = read_records(config)
    assert [source.name for source in records.sources] == ["sums", "count_bits", "sums_2"]
    assert [source.num_rows for source in records.sources] == [3, 5, 2] and records.num_rows == 10
    assert len(records.train) == (5 if streaming else 10) and len(records.test) == 5
    loader = training_prompts(config, records, tokenizer, tokenizer.vocab_size)
    prompts = [prompt for _ in range(4) for prompt in next(loader)]
    assert len({prompt.id for prompt in prompts}) == 160
    of_first = sum(prompt.record.prompt in ("10", "11", "12") for prompt in prompts)
    of_task = sum(prompt.record.prompt.endswith("!") for prompt in prompts)
    assert data_metrics(loader)["data/epoch_sums"] == of_first // 3 and {
        name for name in data_metrics(loader) if name.startswith("data/epoch")} == {
        "data/epoch", "data/epoch_sums", "data/epoch_count_bits", "data/epoch_sums_2"}
    assert 0.4 < of_first / 160 < 0.6 and 0.15 < of_task / 160 < 0.35
    asked = held_out_prompts(config, records, tokenizer, tokenizer.vocab_size)
    assert [prompt.record.data_source for prompt in asked] == ["held", "count_bits", "held", "count_bits", "count_bits"]


def test_streamed_prompts_are_those_in_memory(tmp_path: Path):
    tokenizer = open_tokenizer(make_tokenizer(tmp_path))
    prompts = [f"{i} + {i} =" for i in range(20)]
    held, streamed = (files(tmp_path, prompts, ["3"], "data.shuffle=false", "data.prompts_per_step=8", *more)
                      for more in ((), ("data.streaming=true",)))
    batches = []
    for config in (held, streamed):
        loader = training_prompts(config, read_records(config), tokenizer, tokenizer.vocab_size)
        batches.append([next(loader) for _ in range(6)])
    assert batches[0] == batches[1]
    small, large = (training_prompts(config, read_records(config), tokenizer, tokenizer.vocab_size) for config in (
        files(tmp_path, prompts, ["3"], "data.streaming=true", f"data.shuffle_buffer={rows}") for rows in (1, 20)))
    assert next(small) != next(large)  # the key changes something
    (tmp_path / "train.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="train.jsonl row 1: key 'data_source' is missing"):
        training_prompts(streamed, read_records(streamed), tokenizer, tokenizer.vocab_size)


def test_a_streamed_prompt_must_not_be_held_out(tmp_path: Path):
    tokenizer = open_tokenizer(make_tokenizer(tmp_path))
    config = files(tmp_path, ["1", "2"], ["2"], "data.streaming=true", "data.prompts_per_step=2")
    loader = training_prompts(config, read_records(config), tokenizer, tokenizer.vocab_size)
    with pytest.raises(ValueError, match=r"train.jsonl row 2: .* held-out prompt too \(\S*test.jsonl row 1\)"):
        next(loader)


@pytest.mark.parametrize(("overlong", "ids"), [("truncate_left", slice(-3, None)), ("truncate_right", slice(0, 3))])
def test_prompts_and_pairs_are_cut(tmp_path: Path, overlong: str, ids: slice):
    tokenizer = open_tokenizer(make_tokenizer(tmp_path))
    config = files(tmp_path, ["1 + 2 + 3 + 4"], ["7 + 8 + 9 + 4"], f"data.overlong={overlong}",
                   "data.max_prompt_length=3", "generation.max_new_tokens=4", "data.prompts_per_step=1",
                   "train.global_batch_size=1")
    records, whole = read_records(config), tokenizer.encode_prompt("1 + 2 + 3 + 4")
    loader = training_prompts(config, records, tokenizer, tokenizer.vocab_size)
    assert next(loader)[0].ids == tuple(whole[ids]) and data_metrics(loader) == {
        "data/epoch": 1.0, "data/dropped": 0.0, "data/truncated": 1.0}
    asked = held_out_prompts(config, records, tokenizer, tokenizer.vocab_size)
    assert asked[0].ids == tuple(tokenizer.encode_prompt("7 + 8 + 9 + 4")[ids])
    pair = next(training_pairs(config, records, tokenizer, tokenizer.vocab_size))[0]
    assert len(pair.prompt_ids) + len(pair.response_ids) == 7 and pair.response_ids[-1] == tokenizer.eos_id


def test_of_several_held_out_sources_each_is_asked(tmp_path: Path):
    tokenizer = open_tokenizer(make_tokenizer(tmp_path))
    config = files(tmp_path, ["1"], [], "evaluation.prompts=4")
    write(tmp_path / "test.jsonl", ["2", "3", "4"], "a")
    config = load_config({"data": {"source": "jsonl", "train_files": config.data.train_files,
                                   "test_files": [f"{tmp_path}/test.jsonl",
                                                  write(tmp_path / "more.jsonl", ["5", "6", "7"], "b")]}},
                         ["evaluation.prompts=4"])
    asked = held_out_prompts(config, read_records(config), tokenizer, tokenizer.vocab_size)
    assert [(prompt.id, prompt.record.prompt) for prompt in asked] == [(0, "2"), (3, "5"), (1, "3"), (4, "6")]


def ranks_stream(world: World, folder: str, sizes: list[int]) -> str:
    own = Path(folder) / f"{world.size}_{world.rank}"
    own.mkdir()
    try:
        prompts = [f"{i:05d}" for i in range(sizes[world.rank])]
        require_same_data(world, read_records(files(own, prompts, ["held out"], "data.streaming=true")))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_must_stream_the_same_files(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert run_ranks(2, ranks_stream, str(tmp_path / "a"), [4, 4]) == ["", ""]
    for told in run_ranks(2, ranks_stream, str(tmp_path / "b"), [4, 5]):
        assert told.startswith("ranks [1] have other prompts than rank 0")
