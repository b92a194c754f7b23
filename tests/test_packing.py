"""Cutting rows into micro-batches: a hard cap, balanced, as many on every replica, none lost, the same everywhere."""

import random

import pytest

from hybridflow.packing import Cut, MicroBatching, SharedPrompt, by_rows, by_tokens, shared_tokens, split_rows
from hybridflow.parallel.arithmetic import ceil_div, round_up


def tokens_of(cut: Cut, lengths: list[int]) -> list[list[int]]:
    """Tokens of each micro-batch of each replica."""
    return [[sum(lengths[row] for row in rows) for rows in replica] for replica in cut]


def draw(kind: str, rows: int, seed: int) -> list[int]:
    """Lengths of at most 1000, from a distribution called `kind`."""
    source = random.Random(seed)
    kinds = {
        "even": lambda: source.randint(1, 1000),
        "short": lambda: source.randint(1, 30),
        "long": lambda: source.randint(501, 1000),  # no two fit together
        "equal": lambda: 334,  # two fit, three do not
        "tail": lambda: min(1000, int(20 * source.paretovariate(0.8))),
        "two": lambda: source.choice((1, 1000)),
    }
    return [kinds[kind]() for _ in range(rows)]


KINDS = ("even", "short", "long", "equal", "tail", "two")


def test_equal_rows_of_which_two_do_not_fit():  # case 9: a soft cap gives one of 14
    cut = by_tokens([7] * 8, 1, 8)
    assert tokens_of(cut, [7] * 8) == [[7] * 8]
    assert tokens_of(by_tokens([7] * 8, 4, 8), [7] * 8) == [[7, 7]] * 4


def test_a_row_beyond_the_budget_is_named():  # case 9
    with pytest.raises(ValueError, match=r"row 2 has 9 tokens.*train\.micro_batch_tokens 8"):
        by_tokens([3, 8, 9, 1], 2, 8)
    with pytest.raises(ValueError, match=r"row 0 has 9 tokens.*micro_batch_tokens 10.*of which 8 is a multiple of 4"):
        by_tokens([9], 1, 10, multiple_of=4)


def test_replicas_have_as_many_micro_batches_as_each_other():  # case 10
    lengths = [8, 8, 8, 8, 32, 32, 8]
    cut = by_tokens(lengths, 3, 32)
    assert [len(replica) for replica in cut] == [2, 2, 2]
    assert sorted(row for replica in cut for rows in replica for row in rows) == list(range(7))
    assert max(tokens for replica in tokens_of(cut, lengths) for tokens in replica) == 32
    assert by_tokens([5], 3, 8) == (((0,),), ((),), ((),))
    assert by_tokens([], 2, 8) == (((),), ((),))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("multiple_of", [1, 8])
def test_what_every_cut_holds(kind: str, multiple_of: int):
    worlds = ((1, 1, 1000), (3, 4, 1000), (50, 1, 1003), (50, 4, 1500), (333, 3, 4096))
    for seed, (rows, dp, budget) in enumerate(worlds):
        lengths = draw(kind, rows, seed)
        cut = by_tokens(lengths, dp, budget, multiple_of)
        assert len(cut) == dp and len({len(replica) for replica in cut}) == 1
        assert sorted(row for replica in cut for micro_batch in replica for row in micro_batch) == list(range(rows))
        assert all(list(micro_batch) == sorted(micro_batch) for replica in cut for micro_batch in replica)
        filled = tokens_of(cut, lengths)
        assert all(round_up(tokens, multiple_of) <= budget for replica in filled for tokens in replica)
        assert all(replica == sorted(replica, reverse=True) for replica in filled)


@pytest.mark.parametrize("kind", KINDS)
def test_there_are_few_and_they_are_balanced(kind: str):
    for dp, budget in ((1, 2000), (4, 2000), (8, 8000)):
        lengths = draw(kind, 1000, dp)
        filled = tokens_of(by_tokens(lengths, dp, budget), lengths)
        total, halves = sum(lengths), sum(length > budget / 2 for length in lengths)
        least = max(ceil_div(total, dp * budget), ceil_div(halves, dp))
        if kind == "equal":  # only whole rows fit
            least = ceil_div(1000, dp * (budget // 334))
        slack = 11 / 9 if kind == "long" else 1.05  # three fit only where they are short: the bound is loose
        assert len(filled[0]) <= least * slack + 1, (kind, dp, budget, len(filled[0]), least)
        of_replica = [sum(replica) for replica in filled]
        allowed = min(budget, 0.05 * total / dp + 1000)
        assert max(of_replica) - min(of_replica) <= allowed, (kind, dp, budget, of_replica)
        if kind in ("short", "tail"):  # many small rows level out
            flat = [tokens for replica in filled for tokens in replica]
            assert max(flat) - min(flat) <= 0.02 * budget, (kind, dp, budget, min(flat), max(flat))


def test_the_order_of_rows_changes_only_their_numbers():
    lengths = draw("even", 40, 5)
    turned = lengths[::-1]
    assert tokens_of(by_tokens(lengths, 4, 3000), lengths) == tokens_of(by_tokens(turned, 4, 3000), turned)
    assert by_tokens(lengths, 4, 3000) == by_tokens(list(lengths), 4, 3000)


def test_rows_are_split_in_order():
    assert split_rows(range(10), 4) == [(0, 1, 2), (3, 4, 5), (6, 7), (8, 9)]
    assert split_rows(range(2), 4) == [(0,), (1,), (), ()]
    assert by_rows(range(10), 4, 2) == (((0, 1), (2,)), ((3, 4), (5,)), ((6, 7),), ((8, 9),))
    assert by_rows(range(2), 3, 5) == (((0,),), ((1,),), ((),))


def test_ten_thousand_rows_do_not_take_a_search():
    lengths = draw("tail", 10_000, 1)
    cut = by_tokens(lengths, 16, 1000)
    assert sum(len(rows) for replica in cut for rows in replica) == 10_000


def test_micro_batches_are_of_rows_or_of_tokens():
    assert MicroBatching(rows=2).cut([9, 9, 9], 1, 4) == (((0, 1), (2,)),)
    assert MicroBatching(tokens=20).cut([9, 9, 9], 1) == (((0, 2), (1,)),)
    assert str(MicroBatching(rows=2)) == "2 rows" and str(MicroBatching(tokens=20)) == "20 tokens"
    for wrong in ({}, {"rows": 1, "tokens": 1}):
        with pytest.raises(ValueError, match="one of the two"):
            MicroBatching(**wrong)


def shared_cut(lengths, groups, prompt, dp, budget, multiple_of=1):
    prompts = [SharedPrompt(group, prompt) for group in groups]
    cut = MicroBatching(tokens=budget).cut(lengths, dp, multiple_of, prompts=prompts)
    filled = [[shared_tokens(rows, lengths, prompts) for rows in replica] for replica in cut]
    assert sorted(row for replica in cut for rows in replica for row in rows) == list(range(len(lengths)))
    assert len({len(replica) for replica in cut}) == 1
    assert all(tokens <= budget - budget % multiple_of for replica in filled for tokens in replica)
    return cut, filled


def test_rows_that_share_a_prompt_count_it_once_and_go_together():
    cut, filled = shared_cut([6, 6, 6], [0, 0, 0], 4, dp=1, budget=10)
    assert cut == (((0, 1, 2),),) and filled == [[10]]
    cut, filled = shared_cut([96] * 32, [row // 8 for row in range(32)], 32, dp=1, budget=2176)
    assert filled == [[2176]]
    cut, filled = shared_cut([96] * 32, [row // 8 for row in range(32)], 32, dp=2, budget=600)
    assert filled == [[544, 544], [544, 544]]
    assert all(len({row // 8 for row in rows}) == 1 for replica in cut for rows in replica)


def test_a_group_is_cut_where_it_does_not_fit_or_replicas_would_wait():
    cut, filled = shared_cut([20] * 8, [0] * 8, 4, dp=2, budget=100)
    assert filled == [[68], [68]]  # half of the group on each
    cut, filled = shared_cut([20] * 8, [0] * 8, 4, dp=1, budget=40)
    assert len(cut[0]) == 4 and filled == [[36] * 4]


def test_shared_prompts_take_no_more_than_prompts_of_their_own():
    draw = random.Random(3)
    for _ in range(30):
        groups = [draw.randrange(5) for _ in range(24)]
        lengths = [12 + draw.randrange(30) for _ in groups]
        dp = draw.choice((1, 2, 3))
        cut, filled = shared_cut(lengths, groups, 12, dp, budget=64, multiple_of=2)
        alone = MicroBatching(tokens=64).cut(lengths, dp, 2)
        assert len(cut[0]) <= len(alone[0])
        assert max(map(sum, filled)) <= max(sum(lengths[row] for rows in replica for row in rows) for replica in alone)


def test_a_row_longer_than_the_budget_is_named_where_prompts_are_shared():
    with pytest.raises(ValueError, match="row 1 has 9 tokens, more than train.micro_batch_tokens 8"):
        shared_cut([5, 9], [0, 0], 4, dp=1, budget=8)


# --- units of rows ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("at_once", [MicroBatching(rows=1), MicroBatching(rows=3), MicroBatching(tokens=2000)])
@pytest.mark.parametrize(("pairs", "dp"), [(7, 4), (3, 4), (0, 2), (20, 3)])
def test_no_cut_parts_the_rows_of_a_unit(at_once: MicroBatching, pairs: int, dp: int):
    lengths = draw("tail", 2 * pairs, seed=pairs)
    cut = at_once.cut(lengths, dp, together=2)
    rows = [row for replica in cut for micro_batch in replica for row in micro_batch]
    assert sorted(rows) == list(range(2 * pairs)) and len(cut) == dp
    for micro_batch in (rows for replica in cut for rows in replica):
        assert all(micro_batch[i + 1] == micro_batch[i] + 1 and micro_batch[i] % 2 == 0
                   for i in range(0, len(micro_batch), 2))
        assert at_once.rows is None or len(micro_batch) <= 2 * at_once.rows
        assert at_once.tokens is None or sum(lengths[row] for row in micro_batch) <= at_once.tokens


def test_a_unit_beyond_the_budget_is_named():
    with pytest.raises(ValueError, match="unit of 2 rows 1 has 9 tokens"):
        MicroBatching(tokens=8).cut([3, 5, 8, 1], 2, together=2)
    assert MicroBatching(rows=1).counted("pair") == "1 pair" and MicroBatching(tokens=9).counted("pair") == "9 tokens"
