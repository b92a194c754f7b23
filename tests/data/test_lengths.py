"""What becomes of rows that are too long, one by one and in loaders."""

import pytest

from hybridflow.data.lengths import LengthCounts, LengthRule
from hybridflow.data.loader import PromptLoader
from hybridflow.data.records import TextPair
from hybridflow.data.sft import SftLoader
from hybridflow.data.token_rows import Overlong, TokenRows, within_length
from tests.data.characters import CharacterTokenizer, records, take

LEFT, RIGHT = Overlong.TRUNCATE_LEFT, Overlong.TRUNCATE_RIGHT


@pytest.mark.parametrize(("overlong", "kept"), [(LEFT, (7, 8)), (RIGHT, (5, 6)), (Overlong.DROP, None)])
def test_a_prompt_is_cut_or_left_out(overlong, kept):
    assert LengthRule(2, overlong).prompt((5, 6, 7, 8)) == kept
    for rule in (LengthRule(4, overlong), LengthRule(None, overlong)):
        assert rule.prompt((5, 6, 7, 8)) == (5, 6, 7, 8)


def test_an_error_names_row_length_and_key():
    with pytest.raises(ValueError, match=r"a.jsonl row 3: has 3 tokens, more than data.max_prompt_length = 2. Set data."
                                         r"max_prompt_length to at least 3"):
        LengthRule(2).prompt((5, 6, 7), "a.jsonl row 3")


@pytest.mark.parametrize(("prompt", "response", "left", "right"), [
    ((1, 5, 6), (8, 2), ((5, 6), (8, 2)), ((1, 5), (8, 2))),  # the prompt alone is cut
    ((1, 5), (7, 8, 2), ((5,), (7, 8, 2)), ((1,), (7, 8, 2))),
    ((1, 5), (6, 7, 8, 2), None, ((1,), (6, 7, 8))),  # no room for a prompt: the response is cut, or the pair goes
    ((1,), (5, 6, 7, 8, 2), None, ((1,), (5, 6, 7))),
    ((1, 5), (8, 2), ((1, 5), (8, 2)), ((1, 5), (8, 2))),
])
def test_a_pair_keeps_its_response_where_it_can(prompt, response, left, right):
    assert LengthRule(4, LEFT).pair(prompt, response) == left
    assert LengthRule(4, RIGHT).pair(prompt, response) == right
    fits = len(prompt) + len(response) <= 4
    assert LengthRule(4, Overlong.DROP).pair(prompt, response) == ((prompt, response) if fits else None)


def test_one_token_has_no_room_for_a_pair():
    assert LengthRule(1, RIGHT).pair((1,), (2,)) is None


def test_counts_add_up_and_are_told():
    counts = LengthCounts(dropped=1) + LengthCounts(dropped=1, truncated=1)
    assert counts.sentence(9, "pairs") == "3 of 9 pairs are too long: 2 were dropped and 1 was truncated."
    assert LengthCounts(truncated=1).sentence(9, "prompts") == "1 of 9 prompts is too long: 1 was truncated."
    assert LengthCounts().sentence(9, "pairs") is None


@pytest.mark.parametrize(("overlong", "text"), [(LEFT, "234"), (RIGHT, "\x0112")])
def test_a_prompt_loader_cuts_and_counts(overlong, text):
    rows = records(["1", "1234", "22"])
    loader = PromptLoader(rows, CharacterTokenizer(), 3, 0, False, max_prompt_length=3, overlong=overlong)
    assert loader.counts == LengthCounts(truncated=1) and loader.num_dropped == 0
    batch = take(loader, 1)[0]
    assert [prompt.id for prompt in batch] == [0, 1, 2] and batch[1].ids == tuple(map(ord, text))
    assert batch[1].record == rows[1]  # rewards still see the whole prompt


def test_an_sft_loader_cuts_drops_and_counts():
    pairs = [TextPair("12", "3", "a"), TextPair("12", "345678", "b"), TextPair("1234", "5", "c")]
    left = SftLoader(pairs, CharacterTokenizer(), 2, 0, False, max_length=5, overlong=LEFT)
    assert left.counts == LengthCounts(dropped=1, truncated=1)
    assert [(one.id, one.prompt_ids, one.response_ids) for one in take(left, 1)[0]] == [
        (0, (1, ord("1"), ord("2")), (ord("3"), 2)), (2, (ord("2"), ord("3"), ord("4")), (ord("5"), 2))]
    right = SftLoader(pairs, CharacterTokenizer(), 3, 0, False, max_length=5, overlong=RIGHT)
    assert right.counts == LengthCounts(truncated=2)
    assert take(right, 1)[0][1].response_ids == tuple(map(ord, "3456"))
    with pytest.raises(ValueError, match="none of 1 responses leaves room"):
        SftLoader(pairs[1:2], CharacterTokenizer(), 1, 0, max_length=5, overlong=LEFT)


def test_rows_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match="1 of 1 rows"):
        within_length(TokenRows([(1, 2, 3)]), ["a"], 2, LEFT, "key")
