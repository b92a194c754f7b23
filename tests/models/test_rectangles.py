"""Rectangles of rows: few, little padded whatever the lengths, and every token in a slot of its own."""

import random
from itertools import pairwise

import pytest
import torch

from hybridflow.models.rectangles import FREE_PADDING, MOST_PADDING, Rectangle, lay_out, rectangles

LONGEST = 5120


def draw(kind: str, seed: int) -> tuple[int, ...]:
    """Lengths of up to 512 rows, as skewed as responses can be."""
    rng = random.Random(seed)
    one = {"uniform": lambda: rng.randint(1, LONGEST), "lognormal": lambda: int(rng.lognormvariate(5, 1.3)),
           "pareto": lambda: int(20 * rng.paretovariate(0.8)), "two": lambda: rng.choice((7, LONGEST)),
           "one long": lambda: rng.randint(1, 40), "alike": lambda: rng.randint(900, 1000)}[kind]
    lengths = [min(max(one(), 1), LONGEST) for _ in range(rng.randint(1, 512))]
    return (*lengths, LONGEST) if kind == "one long" else tuple(lengths)


@pytest.mark.parametrize("kind", ["uniform", "lognormal", "pareto", "two", "one long", "alike"])
@pytest.mark.parametrize("seed", range(8))
def test_memory_and_work_are_bounded(kind, seed):
    lengths = draw(kind, seed)
    cut = rectangles(lengths)
    assert sorted(row for rectangle in cut for row in rectangle.rows) == list(range(len(lengths)))
    assert all(rectangle.longest == max(lengths[row] for row in rectangle.rows) for rectangle in cut)
    assert all(a.longest * 0.8 > b.longest for a, b in pairwise(cut))  # so there are at most 39 below 5120 tokens
    assert sum(rectangle.slots for rectangle in cut) <= sum(lengths) * (1 + MOST_PADDING) + FREE_PADDING
    for rectangle in cut[:-1]:
        parts = [lengths[row] for row in rectangle.rows]
        assert rectangle.slots <= sum(parts) * (1 + MOST_PADDING)
        assert rectangle.slots * rectangle.longest <= sum(part**2 for part in parts) * (1 + MOST_PADDING)**2
    [*_, last] = cut
    tokens = sum(lengths[row] for row in last.rows)
    assert last.slots <= max(tokens * (1 + MOST_PADDING), tokens + FREE_PADDING)


def test_by_hand():
    """With 1000 and 800 a row of 600 makes 600 slots of padding, a quarter of 2400 tokens; one of 599 too many."""
    assert rectangles((600, 1000, 800, 1, 2)) == (Rectangle((0, 1, 2), 1000), Rectangle((3, 4), 2))
    assert rectangles((599, 1000, 800)) == (Rectangle((1, 2), 1000), Rectangle((0,), 599))
    assert rectangles((512, 1024)) == (Rectangle((0, 1), 1024),)  # 512 slots are free
    assert rectangles((511, 1024)) == (Rectangle((1,), 1024), Rectangle((0,), 511))


@pytest.mark.parametrize("lengths", [(5,), (7, 7, 7), (990, 1000, 950), (24, 10, 17, 12) * 8, (1, 63, 100)])
def test_rows_nearly_equal_or_short_are_one_rectangle_in_their_order(lengths):
    assert rectangles(lengths) == (Rectangle(tuple(range(len(lengths))), max(lengths)),)


@pytest.mark.parametrize("lengths", [(1,), (3, 1, 2), (1, 2, 63, 100, 1000), (1000, 100, 900, 1, 1000, 640)])
def test_each_token_has_a_slot_and_padding_reads_its_own_row(lengths):
    cut = rectangles(lengths)
    tokens, slots = lay_out(lengths, cut)
    assert tokens.numel() == sum(rectangle.slots for rectangle in cut) and slots.unique().numel() == sum(lengths)
    assert tokens[slots].tolist() == list(range(sum(lengths)))
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    rows = [row for rectangle in cut for row in rectangle.rows for _ in range(rectangle.longest)]
    assert owner[tokens].tolist() == rows


def test_places_by_hand():
    """Rows of 1 and 3 tokens: the first is padded with itself."""
    tokens, slots = lay_out((1, 3), rectangles((1, 3)))
    assert tokens.tolist() == [0, 0, 0, 1, 2, 3] and slots.tolist() == [0, 3, 4, 5]
