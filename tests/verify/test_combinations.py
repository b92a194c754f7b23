"""The selection of combinations: pairs met, cuts that exist, the same every time."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations as pairs_of
from itertools import product

import pytest

from hybridflow.models.recompute import Recompute
from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.verify.combinations import (
    MICRO_BATCHES,
    SMALL_BUCKET,
    Combination,
    Deep,
    Offload,
    TinyModel,
    deep_places,
    every,
    layouts,
    matching,
    selection,
    shapes,
    values,
)


@pytest.mark.parametrize("world, num_layouts", [(1, 1), (2, 4), (4, 10)])
def test_every_pair_of_values_that_can_occur_occurs(world: int, num_layouts: int):
    assert len(layouts(world)) == num_layouts
    chosen = selection(world)
    assert len(chosen) == len(set(chosen)) == 60
    assert pairs(chosen) == pairs(every(world)) == pairs(all_of_all(world))


def pairs(combinations: Iterable[Combination]) -> set[tuple[str, str]]:
    return {pair for one in combinations for pair in pairs_of(values(one), 2)}


def all_of_all(world: int) -> Iterator[Combination]:
    """Enough of them to have all pairs: two axes at a time take all their values, in front of the first of the rest."""
    for layout, kind, vpp in shapes(world):
        first = Combination(layout, kind, vpp)
        yield first
        axes = {"sequence_parallel": (True,) if layout.tp > 1 else (), "micro_batching": MICRO_BATCHES,
                "zero_stage": (1, 2) if layout.dp * layout.cp > 1 else (), "recompute": tuple(Recompute),
                "recompute_layers": (None, 1), "model": tuple(TinyModel), "bucket_bytes": (None, SMALL_BUCKET),
                "deep": deep_places(layout.pp * vpp), "some_failed": (False, True), "offload": tuple(Offload)}
        for (one, ones), (other, others) in pairs_of(axes.items(), 2):
            here = Recompute.FULL if "recompute_layers" in (one, other) else Recompute.NONE  # where it says something
            for ones_value, others_value in product(ones, others):
                yield replace(first, **{"recompute": here, one: ones_value, other: others_value})


def test_eight_ranks_have_every_layout_with_every_schedule():
    chosen = selection(8)
    assert 60 <= len(chosen) <= 100
    assert {one.layout for one in chosen} == set(layouts(8))
    assert {(one.layout, one.schedule) for one in chosen} == {(one.layout, one.schedule) for one in every(8)}
    assert selection(8) == chosen


def test_a_combination_fits_its_ranks_and_reads_as_one_line():
    for one in every(4):
        assert one.layout.size == 4
        assert one.chunks.count == one.layout.pp * one.vpp == len(one.layers_per_chunk)
        assert sorted(one.layers_per_chunk) == [1] * (one.chunks.count - 1) + [2]
        assert sum(one.layers_per_chunk) == one.num_layers
    zero_bubble = Combination(Layout(2, 2), ScheduleKind.ZB_V, 2)
    assert str(zero_bubble) == "tp2 pp2 vpp2 cp1 dp1 zb-v - rows3 zero0 none - actor all deep-first 7of7 -"
    assert matching([Combination(), zero_bubble], "zb-v") == [zero_bubble]


def test_a_second_step_is_cut_in_another_way():
    assert {Combination(micro_batching=cut).second_cut for cut in MICRO_BATCHES} == set(MICRO_BATCHES)
    assert all(one.second_cut != one.micro_batching for one in every(2))


def test_the_layer_more_is_where_it_is_said_to_be():
    four = Combination(Layout(pp=2), ScheduleKind.ZB_V, 2)
    places = [replace(four, deep=deep).layers_per_chunk for deep in Deep]
    assert places == [(2, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)]
    assert [len(deep_places(count)) for count in (1, 2, 3, 12)] == [1, 2, 3, 3]
    assert Combination(layers=5).layers_per_chunk == (5,)
