"""The selection of combinations: pairs met, cuts that exist, the same every time."""

from itertools import combinations as pairs_of

import pytest

from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.verify.combinations import Combination, every, layouts, matching, selection, values


@pytest.mark.parametrize("world, num_layouts", [(1, 1), (2, 4), (4, 10)])
def test_every_pair_of_values_that_can_occur_occurs(world: int, num_layouts: int):
    assert len(layouts(world)) == num_layouts
    chosen = selection(world)
    assert len(chosen) == len(set(chosen)) == 60
    pairs = lambda combinations: {pair for one in combinations for pair in pairs_of(values(one), 2)}  # noqa: E731
    assert pairs(chosen) == pairs(every(world))


def test_eight_ranks_have_every_layout_with_every_schedule():
    chosen = selection(8)
    assert 60 <= len(chosen) <= 100
    assert {one.layout for one in chosen} == set(layouts(8))
    for layout in layouts(8):
        kinds = {one.schedule for one in every(8) if one.layout == layout}
        assert {one.schedule for one in chosen if one.layout == layout} == kinds
    assert selection(8) == chosen


def test_a_combination_fits_its_ranks_and_reads_as_one_line():
    for one in every(4):
        assert one.layout.size == 4
        assert one.chunks.count == one.layout.pp * one.vpp < one.num_layers
    zero_bubble = Combination(Layout(2, 2), ScheduleKind.ZB_V, 2)
    assert str(zero_bubble) == "tp2 pp2 vpp2 cp1 dp1 zb-v - rows3 zero0 none actor all"
    assert matching([Combination(), zero_bubble], "zb-v") == [zero_bubble]
