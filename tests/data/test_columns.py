"""Batches of columns: as a DataLoader collates rows, and as a table has them."""

import numpy
import pytest
import torch
from torch.utils.data import default_collate

from hybridflow.data.columns import records_of_columns
from hybridflow.data.records import ChatMessage
from hybridflow.data.row_schema import parse_row

CHATS = [[{"role": "system", "content": f"s{i}"}, {"role": "user", "content": f"u{i}"}] for i in range(3)]


@pytest.mark.parametrize("prompts", [["a", "b", "c"], CHATS])
@pytest.mark.parametrize("extra", [{}, {"index": 3, "share": 0.5, "name": "n", "ids": [1, 2], "words": ["x", "y"],
                                        "inner": {"b": True}}])
def test_collated_rows_are_the_rows(prompts, extra):
    rows = [{"data_source": "sums", "prompt": prompt, "reward_model": {"ground_truth": str(place), "style": "rule"},
             "extra_info": extra} for place, prompt in enumerate(prompts)]
    assert records_of_columns(default_collate(rows)) == [
        parse_row(row, f"batch row {place}") for place, row in enumerate(rows)]


def test_numbers_become_their_text():
    for truths in (torch.tensor([5, 6]), numpy.array([5, 6]), [5, 6], (5, 6), ["5", "6"]):
        records = records_of_columns({"prompt": ["a", "b"], "ground_truth": truths})
        assert [record.ground_truth for record in records] == ["5", "6"]
    (record,) = records_of_columns({"prompt": ["a"], "ground_truth": [[1, 2]]})
    assert record.ground_truth == "[1, 2]"


def test_plain_columns():
    first, second = records_of_columns({"prompt": [CHATS[0], "b"], "extra_info": [{"a": 1}, None]})
    assert first.prompt == (ChatMessage("system", "s0"), ChatMessage("user", "u0"))
    assert (first.extra_info, first.ground_truth, first.data_source) == ({"a": 1}, "", "")
    assert (second.prompt, second.extra_info, second.origin) == ("b", {}, "batch row 1")


@pytest.mark.parametrize(("columns", "why"), [
    ({"question": ["a"]}, "needs prompt"),
    ({"prompt": ["a"], "answer": ["b"]}, "may have ground_truth"),
    ({"prompt": ["a", "b"], "ground_truth": ["1"]}, r"differ in length: {'prompt': 2, 'ground_truth': 1}"),
    ({"prompt": ["a"], "extra_info": {"a": [1], "b": [1, 2]}}, r"differ in length: {'a': 1, 'b': 2}"),
    ({"prompt": "a"}, "is a str"),
    ({"prompt": ["a", ""]}, "batch row 1: key 'prompt'"),
    ({"prompt": ["a"], "ground_truth": ["1"], "reward_model": {"ground_truth": ["1"]}}, "leave one out"),
])
def test_what_is_no_batch(columns, why):
    with pytest.raises(ValueError, match=why):
        records_of_columns(columns)
