"""Prompt files: both formats give the same records, and every fault names file, row and key."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from hybridflow.data.readers import FileFormat, read_prompt_files
from hybridflow.data.records import ChatMessage, prompt_text

ROWS = [
    {
        "data_source": "sums",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"split": "train", "index": 0},
    },
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": "naïve 字"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "x"},
        "extra_info": None,
    },
]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.parametrize("write, file_format", [(write_jsonl, FileFormat.JSONL), (write_parquet, FileFormat.PARQUET)])
def test_records_of_both_formats(tmp_path, write, file_format):
    path = write(tmp_path / "train.data", ROWS)
    first, second, third, _ = read_prompt_files([path, path], file_format)
    assert first.prompt == (ChatMessage("system", "Be brief."), ChatMessage("user", "2 + 3?"))
    assert (first.data_source, first.ground_truth) == ("sums", "5")
    assert first.extra_info == {"split": "train", "index": 0}
    assert second.extra_info == {}
    assert second.origin == f"{path} row 2" and third.origin == f"{path} row 1"
    assert first.entry is None
    assert prompt_text(first.prompt) == "system: Be brief.\nuser: 2 + 3?"


def test_text_prompts_and_answers_that_are_not_text(tmp_path):
    truths = ["5", 5, 2.5, ["5", "five"], {"target": ["5"]}, False]
    rows = [{"data_source": "s", "prompt": "2 + 3?", "reward_model": {"ground_truth": truth}} for truth in truths]
    records = read_prompt_files([write_jsonl(tmp_path / "a.jsonl", rows)], FileFormat.JSONL)
    assert [r.ground_truth for r in records] == ["5", "5", "2.5", '["5", "five"]', '{"target": ["5"]}', "false"]
    assert records[0].prompt == "2 + 3?"


def edited(**changes):
    return {key: value for key, value in {**ROWS[0], **changes}.items() if value != "absent"}


@pytest.mark.parametrize(
    "row, message",
    [
        (edited(data_source="absent"), "'data_source' is missing"),
        (edited(data_source=7), "'data_source' must be text, got int 7"),
        (edited(prompt="absent"), "'prompt' is missing"),
        (edited(prompt=""), "'prompt' must be text or a list of chat messages, not empty"),
        (edited(prompt=[]), "'prompt' must be text or a list of chat messages, not empty"),
        (edited(prompt=[{"role": "user"}]), r"'prompt\[0\].content' is missing"),
        (edited(prompt=[ROWS[0]["prompt"][0], "hi"]), r"'prompt\[1\]' must be an object with role and content"),
        (edited(prompt=[{"role": "user", "content": [{"type": "image"}]}]), r"'prompt\[0\].content' must be text"),
        (edited(reward_model="absent"), "'reward_model' is missing"),
        (edited(reward_model="5"), "'reward_model' must be an object"),
        (edited(reward_model={"style": "rule"}), "'reward_model.ground_truth' is missing"),
        (edited(prompt="a\ud800"), "'prompt' holds half of a surrogate pair at character 1"),
        (edited(reward_model={"ground_truth": "\ud800"}), "'reward_model.ground_truth' holds half of a surrogate pair"),
        (edited(extra_info=[1]), "'extra_info' must be an object"),
        (edited(images=[{"bytes": "x"}]), "'images' is not empty, and only text is read here"),
        (edited(videos="a.mp4"), "'videos' is not empty"),
        (["a"], "expected an object"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    path = write_jsonl(tmp_path / "bad.jsonl", [ROWS[0], row])
    with pytest.raises(ValueError, match=rf"bad.jsonl row 2: .*{message}"):
        read_prompt_files([path], FileFormat.JSONL)


def test_a_bad_parquet_row_is_named(tmp_path):
    path = write_parquet(tmp_path / "bad.parquet", [ROWS[0], {**ROWS[0], "data_source": None}])
    with pytest.raises(ValueError, match="bad.parquet row 2: key 'data_source' must be text, got NoneType"):
        read_prompt_files([path], FileFormat.PARQUET)


@pytest.mark.parametrize("row", [b'"caf\xe9"', b'{"a": ' + b"1" * 5000 + b"}", b"[" * 100_000])
def test_what_is_no_json_is_named(tmp_path, row):
    (tmp_path / "a.jsonl").write_bytes(json.dumps(ROWS[0]).encode() + b"\n" + row)
    with pytest.raises(ValueError, match="a.jsonl row 2: not JSON"):
        read_prompt_files([str(tmp_path / "a.jsonl")], FileFormat.JSONL)


def test_a_mark_in_front_and_other_ends_of_lines_are_read(tmp_path):
    lines = [json.dumps(row).encode() + b"\r\n" for row in ROWS]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"".join(lines))
    assert len(read_prompt_files([str(tmp_path / "a.jsonl")], FileFormat.JSONL)) == 2


def test_bad_files(tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps(ROWS[0]) + "\n\n{oops\n")
    with pytest.raises(ValueError, match="broken.jsonl row 3: not JSON"):
        read_prompt_files([str(broken)], FileFormat.JSONL)
    with pytest.raises(ValueError, match="broken.jsonl: not a parquet file"):
        read_prompt_files([str(broken)], FileFormat.PARQUET)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="empty.jsonl: has no rows"):
        read_prompt_files([str(tmp_path / "empty.jsonl")], FileFormat.JSONL)
    for file_format in FileFormat:
        with pytest.raises(FileNotFoundError, match="missing"):
            read_prompt_files([str(tmp_path / "missing")], file_format)
    with pytest.raises(ValueError, match="no data files"):
        read_prompt_files([], FileFormat.JSONL)


@pytest.mark.parametrize("write, file_format", [(write_jsonl, FileFormat.JSONL), (write_parquet, FileFormat.PARQUET)])
def test_the_whole_schema(tmp_path, write, file_format):
    """Columns without a meaning here are ignored, extra_info is passed on whole, another style than rule is kept."""
    info = {"split": "train", "index": 7, "need_tools_kwargs": False, "tools_kwargs": {"calc": {"max": 2}},
            "tags": ["a"]}
    rows = [{**ROWS[0], "extra_info": info, "images": [], "videos": None, "agent_name": "single_turn", "uid": 5},
            {**ROWS[0], "reward_model": {"style": "model", "ground_truth": "5"}, "extra_info": {"index": 8}}]
    first, second = read_prompt_files([write(tmp_path / "a.data", rows)], file_format)
    assert first.extra_info == info
    assert second.extra_info["reward_style"] == "model" and second.extra_info["index"] == 8


def test_images_of_a_parquet_file_are_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [{**ROWS[0], "images": []}, {**ROWS[0], "images": [{"bytes": b"x"}]}])
    with pytest.raises(ValueError, match="a.parquet row 2: key 'images' is not empty"):
        read_prompt_files([path], FileFormat.PARQUET)
