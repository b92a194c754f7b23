"""Mixtures: shares by weight, a draw for each place, an epoch for each source, an exact position."""

import json
from collections import Counter

import pytest

from hybridflow.data.lengths import LengthCounts, LengthRule
from hybridflow.data.mixture import Draws, MixedLoader
from hybridflow.data.row_files import RowFiles
from hybridflow.data.token_rows import Overlong
from hybridflow.data.train_source import Loading, TrainSource, pair_loader, prompt_loader
from tests.data.characters import CharacterTokenizer, records, take
from tests.data.test_streamed import write

WEIGHTS = {"a": 3.0, "b": 1.0}


def sources(tmp_path):
    """Five rows in memory with three times the weight of four streamed ones, one of which is too long."""
    path = write(tmp_path / "b.jsonl", ["5", "6", "777", "8"])
    return [TrainSource("a", 3.0, tuple(records(["0", "1", "2", "3", "4"]))),
            TrainSource("b", 1.0, files=RowFiles.open([path]))]


def how(per_step=3, seed=0, shuffle=True):
    return Loading(per_step, seed, shuffle, 2, LengthRule(3, Overlong.DROP), 128)


def loader(tmp_path, **options):
    return prompt_loader(sources(tmp_path), CharacterTokenizer(), how(**options), {})


def test_shares_are_those_of_the_weights():
    drawn = Counter(Draws(WEIGHTS, seed=5).source(place) for place in range(4000))
    assert 0.23 < drawn["b"] / 4000 < 0.27
    windows = [[Draws(WEIGHTS, seed=5).source(place) for place in range(start, start + 4)] for start in range(0, 80, 4)]
    assert len({window.count("b") for window in windows}) > 2  # drawn anew at each place, not dealt in turn


def test_a_draw_depends_on_seed_and_place_alone():
    assert [Draws(WEIGHTS, 1).source(place) for place in range(20)] == [Draws(WEIGHTS, 1).source(p) for p in range(20)]
    assert len({tuple(Draws(WEIGHTS, seed).source(place) for place in range(20)) for seed in range(4)}) == 4
    # Golden: it may not change between machines or versions.
    assert "".join(Draws(WEIGHTS, 0).source(place) for place in range(20)) == "aababaaaaaabaaabbbbb"


def test_every_source_has_its_own_order_and_epoch(tmp_path):
    mixed = loader(tmp_path, per_step=40, shuffle=False)
    batch = next(mixed)
    first = [prompt.id for prompt in batch if prompt.record.prompt in "01234"]
    second = [prompt.id for prompt in batch if prompt.record.prompt not in "01234"]
    assert first == [9 * (i // 5) + i % 5 for i in range(len(first))]
    assert second == [9 * (i // 3) + 5 + (0, 1, 3)[i % 3] for i in range(len(second))]  # row 2 is too long
    assert mixed.epoch == min(len(first) // 5, len(second) // 3) and mixed.num_rows == 9
    assert mixed.counts.dropped >= 2 and len(set(first + second)) == 40


@pytest.mark.parametrize("stop", [0, 1, 2, 5, 9, 13])
def test_a_resumed_run_sees_what_the_straight_run_sees(tmp_path, stop):
    """Over the ends of both sources' epochs, of which there are several in 14 steps."""
    straight = loader(tmp_path)
    expected = take(straight, 14)
    first, second = loader(tmp_path), loader(tmp_path)
    assert take(first, stop) == expected[:stop]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert take(second, 14 - stop) == expected[stop:]
    assert second.state_dict() == straight.state_dict() and straight.epoch >= 2


def test_a_position_of_other_sources_is_refused(tmp_path):
    mixed = loader(tmp_path)
    with pytest.raises(ValueError, match="is of the sources a, c, and this mixture has a, b"):
        mixed.load_state_dict({"place": 0, "sources": {"a": {}, "c": {}}})


@pytest.mark.parametrize("weights", [[1.0, 0.0], [1.0, float("inf")], [-1.0, 2.0], [1.0, float("nan")]])
def test_weights_are_positive_numbers(tmp_path, weights):
    mixed = loader(tmp_path)
    with pytest.raises(ValueError, match="finite numbers above 0"):
        MixedLoader(mixed.sources, weights, 1, 0)


def test_pairs_are_mixed_too(tmp_path):
    how_long = Loading(8, 0, False, 2, LengthRule(6, Overlong.TRUNCATE_LEFT), 128)
    mixed = pair_loader(sources(tmp_path), CharacterTokenizer(), how_long, {})
    batch = next(mixed)
    assert {len(example.response_ids) for example in batch} <= {2, 4} and len({example.id for example in batch}) == 8
    assert mixed.counts + LengthCounts() == mixed.counts


def test_one_source_is_itself(tmp_path):
    one = prompt_loader(sources(tmp_path)[:1], CharacterTokenizer(), how(shuffle=False), {})
    assert one.state_dict() == {"seed": 0, "epoch": 0, "index": 0}
    assert [prompt.id for prompt in next(one)] == [0, 1, 2]
