"""Streamed rows: the same rows as in memory, an order that is a function of the seed, an exact position, bad rows named
when they are met.
"""

import json

import pyarrow
import pyarrow.parquet
import pytest

from hybridflow.data import row_files
from hybridflow.data.lengths import LengthCounts, LengthRule
from hybridflow.data.readers import FileFormat, read_prompt_files
from hybridflow.data.row_files import RowFiles, RowReader
from hybridflow.data.row_source import Numbering
from hybridflow.data.sft import LENGTH_KEYS, SftLoader, sft_pairs
from hybridflow.data.stream_order import StreamCursor
from hybridflow.data.streamed import StreamedLoader, pair_maker, prompt_maker
from hybridflow.data.token_rows import Overlong
from tests.data.characters import CharacterTokenizer, take


def row(text):
    return {"data_source": "s", "prompt": text, "reward_model": {"style": "rule", "ground_truth": text[::-1]},
            "extra_info": {"index": len(text)}}


def write(path, texts, groups=3):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(text) for text in texts]), path,
                                    row_group_size=groups)
    else:
        path.write_text("".join(json.dumps(row(text)) + "\n" for text in texts))
    return str(path)


@pytest.fixture(params=["jsonl", "parquet"])
def files(request, tmp_path, monkeypatch):
    """Eleven rows in two files, blocks of three."""
    monkeypatch.setattr(row_files, "LINES_OF_BLOCK", 3)
    texts = [f"{i:02d}" for i in range(11)]
    return [write(tmp_path / f"a.{request.param}", texts[:7]), write(tmp_path / f"b.{request.param}", texts[7:])]


def loader(paths, per_step=4, seed=0, shuffle=True, buffer=4, rule=None, **options):
    make = prompt_maker(CharacterTokenizer(), rule or LengthRule(None), None)
    return StreamedLoader(RowFiles.open(paths), make, per_step, seed, shuffle, buffer, **options)


def ids(batches):
    return [prompt.id for batch in batches for prompt in batch]


def test_blocks_and_rows_are_those_of_the_files(files):
    opened = RowFiles.open(files)
    assert opened.blocks == (3, 3, 1, 3, 1) and opened.num_rows == 11
    records = read_prompt_files(files, FileFormat.of(files[0]))
    reader = RowReader(opened)
    for order in (range(11), (4, 5, 3, 10, 0, 7, 8, 2)):
        for place in order:
            parsed, origin = reader.parsed(reader.raw(place), place)
            assert parsed["prompt"] == records[place].prompt and origin == records[place].origin


def test_without_shuffle_rows_come_as_they_lie_and_are_those_in_memory(files):
    batches = take(loader(files, shuffle=False), 5)
    assert ids(batches) == list(range(20))
    in_memory = read_prompt_files(files, FileFormat.of(files[0]))
    assert [prompt.record for batch in batches[:2] for prompt in batch] == list(in_memory[:8])
    assert batches[0][1].ids == (1, ord("0"), ord("1")) and batches[2][3].record == in_memory[0]  # id 11: second epoch


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(files):
    seen = ids(take(loader(files, per_step=11), 3))
    epochs = [[i - 11 * epoch for i in seen[11 * epoch:11 * epoch + 11]] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs} | {tuple(range(11))}) == 4
    assert ids(take(loader(files, per_step=11, seed=1), 1)) != seen[:11]


@pytest.mark.parametrize("stop", range(8))
def test_a_resumed_run_sees_what_the_straight_run_sees(files, stop):
    rule = LengthRule(2, Overlong.TRUNCATE_LEFT)
    straight = loader(files, rule=rule)
    expected = take(straight, 8)
    first, second = loader(files, rule=rule), loader(files, rule=rule)
    assert take(first, stop) == expected[:stop]
    take(second, 3)  # whatever it did before
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert take(second, 8 - stop) == expected[stop:]
    assert second.state_dict() == straight.state_dict() and straight.counts == LengthCounts(truncated=32)


def test_the_order_is_a_promise():
    """Golden: it may not change between machines or versions, or a resumed run would see other data."""
    cursor = StreamCursor((3, 3, 2), seed=0, shuffle=True, buffer=3)
    visits = [cursor.take() for _ in range(16)]
    assert [visit.epoch for visit in visits] == [0] * 8 + [1] * 8
    assert [visit.row for visit in visits] == [6, 7, 5, 0, 4, 2, 3, 1, 3, 0, 1, 2, 6, 7, 4, 5]


def test_the_rows_in_memory_are_those_of_the_buffer(files):
    source = loader(files, per_step=1, buffer=4)
    for _ in range(30):
        next(source)
        assert len(source._raw) <= 4


def test_positions_outside_the_data_are_refused():
    cursor = StreamCursor((3, 3), 0, True, 2)
    for state in ({"epoch": 0, "index": 6}, {"epoch": -1, "index": 0}):
        with pytest.raises(ValueError, match="outside this data of 6 rows"):
            cursor.load_state_dict({"seed": 0, **state})
    with pytest.raises(ValueError, match="saved under train.seed 3"):
        cursor.load_state_dict({"seed": 3, "epoch": 0, "index": 1})
    with pytest.raises(ValueError, match="buffer has 0 rows"):
        StreamCursor((3,), 0, True, 0)
    with pytest.raises(ValueError, match="data set is empty"):
        StreamCursor((), 0, True, 1)


def test_rows_that_are_left_out_are_passed_over_and_counted(tmp_path):
    path = write(tmp_path / "a.jsonl", ["1", "22", "333", "44"])
    source = loader([path], shuffle=False, per_step=3, rule=LengthRule(3, Overlong.DROP))
    assert ids(take(source, 2)) == [0, 1, 3, 4, 5, 7]
    assert source.counts == LengthCounts(dropped=2) and source.epoch == 2
    with pytest.raises(ValueError, match="row 3: has 4 tokens, more than data.max_prompt_length = 3"):
        take(loader([path], shuffle=False, rule=LengthRule(3)), 1)
    with pytest.raises(ValueError, match="all 4 rows of .*a.jsonl and the files beside it are too long"):
        take(loader([path], rule=LengthRule(1, Overlong.DROP)), 1)


def test_one_row_that_fits_is_found_again_in_every_epoch(tmp_path):
    path = write(tmp_path / "a.jsonl", ["1"] + ["4" * 9] * 9)
    for seed in range(4):
        assert len(ids(take(loader([path], seed=seed, rule=LengthRule(3, Overlong.DROP)), 3))) == 12


def test_bad_rows_are_named_when_they_are_met(tmp_path):
    path = tmp_path / "a.jsonl"
    bad = {**row("x"), "reward_model": {"style": "rule"}}
    path.write_text("\n".join(["", json.dumps(row("1")), "", json.dumps(row("2")), json.dumps(bad), "{oops", ""]))
    source = loader([str(path)], shuffle=False, per_step=1)
    take(source, 2)
    with pytest.raises(ValueError, match="a.jsonl row 5: key 'reward_model.ground_truth' is missing"):
        next(source)
    with pytest.raises(ValueError, match="a.jsonl row 6: not JSON"):
        next(source)
    path.write_text(json.dumps(bad))
    with pytest.raises(ValueError, match="row 1: key 'reward_model.ground_truth'"):
        loader([str(path)])  # the first row is looked at before ranks meet


def test_files_without_rows_and_other_files_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="empty.jsonl: has no rows"):
        RowFiles.open([str(tmp_path / "empty.jsonl")])
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(ValueError, match="not a parquet file"):
        RowFiles.open([str(tmp_path / "a.parquet")])


def test_a_held_out_prompt_is_not_trained_on(tmp_path):
    source = loader([write(tmp_path / "a.jsonl", ["1", "2"])], shuffle=False, held_out={"2": "test.jsonl row 9"})
    with pytest.raises(ValueError, match=r"a.jsonl row 2: .* held-out prompt too \(test.jsonl row 9\)"):
        next(source)


def test_pairs_are_those_in_memory(tmp_path):
    path = write(tmp_path / "a.parquet", ["1", "22", "4444", "333"])
    rule = LengthRule(8, Overlong.TRUNCATE_LEFT, LENGTH_KEYS)
    streamed = StreamedLoader(RowFiles.open([path]), pair_maker(CharacterTokenizer(), rule, None), 3, 0, False, 1)
    held = SftLoader(sft_pairs(read_prompt_files([path], FileFormat.PARQUET)), CharacterTokenizer(), 3, 0, False, 8,
                     Overlong.TRUNCATE_LEFT)
    assert take(streamed, 4) == take(held, 4)
    assert held.counts == LengthCounts(truncated=1) and streamed.counts == LengthCounts(truncated=3)  # as often as met


def test_ids_are_those_of_its_place_among_sources(tmp_path):
    source = loader([write(tmp_path / "a.jsonl", ["1", "2"])], shuffle=False, per_step=3, numbering=Numbering(10, 15))
    assert ids(take(source, 1)) == [10, 11, 25]


def test_a_mark_tells_other_sizes_starts_and_ends(tmp_path):
    texts = [f"{i:06d}" for i in range(3000)]
    path = write(tmp_path / "a.jsonl", texts)
    marks = [RowFiles.open([path]).mark()]
    for place in (0, 2999):
        write(tmp_path / "a.jsonl", [*texts[:place], "x" * 6, *texts[place + 1:]])
        marks.append(RowFiles.open([path]).mark())
    write(tmp_path / "a.jsonl", texts[:-1])
    marks.append(RowFiles.open([path]).mark())
    assert len({str(mark) for mark in marks}) == 4
    json.dumps(marks)
