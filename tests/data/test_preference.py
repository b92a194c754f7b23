"""Preference rows: every form in which they are published, faults that name row, key and rule, and loaders."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from hybridflow.data.lengths import LengthCounts
from hybridflow.data.preference import (
    LabelRows,
    Limits,
    PairExample,
    PairRows,
    PreferenceLoader,
    TextLabel,
    TextPreference,
    as_labels,
    preference_fingerprint,
)
from hybridflow.data.preference_pairs import WrongAnswer, preference_pairs
from hybridflow.data.preference_rows import held_out_records, parse_preference, read_preference_files
from hybridflow.data.readers import FileFormat
from hybridflow.data.records import ChatMessage, PromptRecord
from hybridflow.data.token_rows import Overlong
from tests.data.test_loader import CharacterTokenizer

ASKED = (ChatMessage("user", "2+3"),)


def said(role, content):
    return {"role": role, "content": content}


USER, RIGHT, WRONG = said("user", "2+3"), said("assistant", "5"), said("assistant", "6")


@pytest.mark.parametrize(("row", "prompt"), [
    ({"prompt": "2+3", "chosen": "5", "rejected": "6"}, "2+3"),
    ({"prompt": [USER], "chosen": "5", "rejected": "6"}, ASKED),
    ({"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]}, ASKED),
    ({"prompt": "2+3", "chosen": [RIGHT], "rejected": [WRONG]}, "2+3"),
    ({"chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, ASKED),
    ({"prompt": None, "chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, ASKED),
    ({"prompt": "2+3", "chosen": [USER, RIGHT], "rejected": [USER, WRONG], "score": 3}, ASKED),
    ({"prompt": [USER], "chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, ASKED),
])
def test_forms_of_pairs(row, prompt):
    assert parse_preference(row, "f row 1") == TextPreference(prompt, "5", "6", 0.0, "f row 1")


def test_the_shared_start_may_have_many_turns():
    turns = [said("system", "Add."), USER, RIGHT, said("user", "4+4")]
    found = parse_preference({"chosen": [*turns, said("assistant", "8")], "rejected": [*turns, WRONG]}, "f")
    assert [message.content for message in found.prompt] == ["Add.", "2+3", "5", "4+4"]
    assert (found.chosen, found.rejected) == ("8", "6")


@pytest.mark.parametrize(("row", "prompt"), [
    ({"prompt": "2+3", "completion": "6", "label": False}, "2+3"),
    ({"prompt": [USER], "completion": [WRONG], "label": False}, ASKED),
    ({"prompt": [USER], "completion": [USER, WRONG], "label": False}, ASKED),
])
def test_forms_of_labels(row, prompt):
    assert parse_preference(row, "f row 1") == TextLabel(prompt, "6", False, "f row 1")


@pytest.mark.parametrize(("row", "message"), [
    ([1], "f row 9: expected an object with prompt, chosen and rejected"),
    ({"prompt": "a", "chosen": "5"}, "key 'rejected' is missing"),
    ({"chosen": "5", "rejected": "6"}, "key 'prompt' is missing"),
    ({"prompt": "a", "chosen": "5", "rejected": [WRONG]}, "must both be text"),
    ({"prompt": "a", "chosen": 5, "rejected": "6"}, "key 'chosen' must be text or a list of chat messages"),
    ({"chosen": [RIGHT], "rejected": [WRONG]}, "key 'prompt' is missing, and"),
    ({"chosen": [USER, RIGHT], "rejected": [USER]}, "key 'rejected' must end with one message of the assistant"),
    ({"chosen": [USER, RIGHT, USER], "rejected": [USER, WRONG]}, "has assistant, user there"),
    ({"prompt": "2-3", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, "key 'prompt' is not what"),
    ({"prompt": "a", "chosen": [{"role": "user"}], "rejected": [WRONG]}, r"key 'chosen\[0\].content' is missing"),
    ({"prompt": "a", "chosen": "\ud800", "rejected": "6"}, "key 'chosen' holds half of a surrogate"),
    ({"prompt": "a", "completion": "5", "label": 1}, "key 'label' must be true or false"),
    ({"prompt": "a", "completion": "5"}, "key 'label' must be true or false"),
    ({"prompt": "a", "label": True}, "key 'completion' is missing"),
])
def test_faults_name_row_key_and_rule(row, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_preference(row, "f row 9")
    assert str(caught.value).startswith("f row 9: ")


def test_margins():
    row = {"prompt": "a", "chosen": "5", "rejected": "6", "gap": 2}
    assert parse_preference(row, "f", "gap").margin == 2.0 and parse_preference(row, "f").margin == 0.0
    for wrong in ({"gap": "2"}, {"gap": float("nan")}, {"gap": None}, {"gap": 1e300}, {"gap": 10**400}):
        with pytest.raises(ValueError, match=r"key 'gap' \(preference.margin_key\) must be a number in"):
            parse_preference(row | wrong, "f", "gap")
    with pytest.raises(ValueError, match="of which the margin is"):
        parse_preference({"prompt": "a", "completion": "5", "label": True}, "f", "gap")


def test_files_of_both_formats_give_the_same_rows_and_equal_answers_are_left_out(tmp_path):
    rows = [{"prompt": "2+3", "chosen": "5", "rejected": "6", "gap": 1.5},
            {"prompt": "1+1", "chosen": "2", "rejected": "2", "gap": 0.0},
            {"prompt": "1+3", "chosen": "4", "rejected": "", "gap": 0.5}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = [read_preference_files([str(tmp_path / f"a.{kind.value}")], kind, "gap") for kind in FileFormat]
    assert [num_equal for _, num_equal in found] == [1, 1]
    found = [rows for rows, _ in found]
    for rows in found:
        assert [(row.prompt, row.chosen, row.rejected, row.margin) for row in rows] == [
            ("2+3", "5", "6", 1.5), ("1+3", "4", "", 0.5)]
        assert rows[1].origin.endswith("row 3")
    assert preference_fingerprint(found[0]) == preference_fingerprint(found[1])
    assert preference_fingerprint(found[0]) != preference_fingerprint(found[0][:1])
    (tmp_path / "same.jsonl").write_text(json.dumps({"prompt": "1+1", "chosen": "2", "rejected": "2"}))
    with pytest.raises(ValueError, match="same.jsonl: has no rows with a preference"):
        read_preference_files([str(tmp_path / "same.jsonl")], FileFormat.JSONL)


def test_pairs_become_labels_and_held_out_prompts():
    pair, label = TextPreference("a", "5", "6", origin="f row 1"), TextLabel("b", "7", False)
    assert [(row.response, row.desirable) for row in as_labels([pair, label])] == [("5", True), ("6", False),
                                                                                   ("7", False)]
    assert [(r.prompt, r.ground_truth) for r in held_out_records([label, pair, pair])] == [("a", "5")]


# --- wrong answers made from records ----------------------------------------------------------------------------------

RECORDS = [PromptRecord("s", f"{i}", answer) for i, answer in enumerate(["abc", "bca", "abc", "xyz", "aa"] * 20)]


@pytest.mark.parametrize("wrong", WrongAnswer)
def test_wrong_answers_differ_and_come_from_the_seed(wrong):
    pairs = preference_pairs(RECORDS, wrong, 3)
    assert len(pairs) == len(RECORDS) and all(pair.chosen != pair.rejected and pair.rejected for pair in pairs)
    assert pairs == preference_pairs(RECORDS, wrong, 3) != preference_pairs(RECORDS, wrong, 4)
    if wrong is WrongAnswer.OTHER:
        assert {pair.rejected for pair in pairs} == {"abc", "bca", "xyz", "aa"}
    else:
        assert all(abs(len(pair.rejected) - len(pair.chosen)) <= 1 for pair in pairs)


def test_records_without_a_wrong_answer_are_left_out_or_refused():
    same = [PromptRecord("s", str(i), "1") for i in range(3)]
    with pytest.raises(ValueError, match="no wrong answer .other. was found for any of 3 prompts"):
        preference_pairs(same, WrongAnswer.OTHER, 0)
    assert len(preference_pairs([*same, PromptRecord("t", "a", "1"), PromptRecord("t", "b", "2")],
                                WrongAnswer.OTHER, 0)) == 2


# --- loaders ----------------------------------------------------------------------------------------------------------

LIMITS = Limits(prompt=4, response=4, overlong=Overlong.ERROR, vocab_size=128)


def rows(count, limits=LIMITS):
    return PairRows([TextPreference(str(i), str(2 * i), "x", 0.5 * i, f"f row {i}") for i in range(count)],
                    CharacterTokenizer(), limits)


def test_both_answers_are_tokenised_apart_from_the_prompt_and_end():
    assert rows(3).example(1) == PairExample(1, (1, ord("1")), (ord("2"), 2), (ord("x"), 2), 0.5)
    labels = LabelRows([TextLabel("ab", "c", True)], CharacterTokenizer(), LIMITS)
    assert labels.example(0).response_ids == (ord("c"), 2) and labels.example(0).desirable


def test_the_order_is_that_of_epochs_and_goes_on_from_a_state():
    straight = PreferenceLoader(rows(7), 3, seed=5)
    batches = [[one.row for one in next(straight)] for _ in range(9)]
    assert all(sorted(sum(batches, [])[start:start + 7]) == list(range(7)) for start in (0, 7, 14))
    first = PreferenceLoader(rows(7), 3, seed=5)
    for _ in range(4):
        next(first)
    resumed = PreferenceLoader(rows(7), 3, seed=5)
    resumed.load_state_dict(first.state_dict())
    assert [[one.row for one in next(resumed)] for _ in range(5)] == batches[4:]
    with pytest.raises(ValueError, match="examples_per_step is 0"):
        PreferenceLoader(rows(7), 0, seed=5)


def test_long_rows_are_cut_as_the_policy_says_and_counted():
    pairs = [TextPreference("1234", "5", "6", origin="a"), TextPreference("1", "5678", "56799", origin="b"),
             TextPreference("1", "5678", "56", origin="c")]
    left = PairRows(pairs, CharacterTokenizer(), Limits(3, 3, Overlong.TRUNCATE_LEFT, 128))
    assert left.kept == [0] and left.counts == LengthCounts(dropped=2, truncated=1)
    assert left.example(0) == PairExample(0, tuple(map(ord, "234")), (ord("5"), 2), (ord("6"), 2))
    right = PairRows(pairs, CharacterTokenizer(), Limits(3, 3, Overlong.TRUNCATE_RIGHT, 128))
    assert right.kept == [0, 2] and right.counts == LengthCounts(dropped=1, truncated=2)  # b: both are 567 now
    assert right.example(2).chosen_ids == tuple(map(ord, "567")) and right.example(2).rejected_ids[-1] == 2
    assert right.example(0).prompt_ids == (1, ord("1"), ord("2"))
    labels = LabelRows(as_labels(pairs), CharacterTokenizer(), Limits(3, 3, Overlong.TRUNCATE_RIGHT, 128))
    assert labels.kept == list(range(6)) and labels.counts == LengthCounts(truncated=5)
    with pytest.raises(ValueError, match="no row has both"):
        PairRows(pairs[1:], CharacterTokenizer(), Limits(3, 3, Overlong.TRUNCATE_LEFT, 128))


def test_long_rows_are_refused_or_dropped_by_the_part_that_is_too_long():
    tight = Limits(4, 3, Overlong.ERROR, 128)
    with pytest.raises(ValueError, match=r"generation.max_new_tokens = 3 tokens; the longest, f row 50, has 4"):
        rows(51, tight)
    kept = rows(51, Limits(4, 3, Overlong.DROP, 128))
    assert PreferenceLoader(kept, 2, 0).counts == LengthCounts(dropped=1) and kept.kept == list(range(50))
    with pytest.raises(ValueError, match="data.max_prompt_length = 1"):
        rows(3, Limits(1, 3, Overlong.ERROR, 128))
    with pytest.raises(ValueError, match="f row 0: token id 120 at position 0 is not in the model's vocabulary"):
        rows(3, Limits(4, 4, Overlong.ERROR, 64))
