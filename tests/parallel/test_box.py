"""Box geometry: subtraction and cutting lose and repeat nothing."""

from itertools import product

import torch

from hybridflow.parallel.box import Box, Shard


def cells(boxes: list[Box]) -> list[tuple[int, ...]]:
    return [cell for box in boxes for cell in product(*(range(a, b) for a, b in zip(box.lo, box.hi)))]


def test_subtract_leaves_exactly_the_other_cells():
    box = Box("w", (0, 0, 1), (4, 3, 3))
    for lo in product(range(-1, 3), range(3), range(3)):
        other = Box("w", lo, tuple(x + 2 for x in lo))
        rest = cells(box.subtract(other))
        assert len(rest) == len(set(rest))
        assert set(rest) == set(cells([box])) - set(cells([other]))


def test_boxes_of_other_tensors_do_not_meet():
    assert Box("a", (0,), (4,)).intersect(Box("b", (0,), (4,))) is None
    assert Box("a", (0,), (4,)).subtract(Box("b", (0,), (4,))) == [Box("a", (0,), (4,))]


def test_cut_keeps_every_cell_once_within_the_limit():
    box = Box("w", (1, 0, 2), (4, 5, 9))
    for limit in (1, 2, 7, 8, 34, 35, 36, 200):
        pieces = box.cut(limit)
        assert max(piece.numel for piece in pieces) <= limit
        assert cells(pieces) == sorted(cells([box]))


def test_a_shard_views_its_box_and_parts_of_it():
    full = torch.arange(48.0).view(8, 6)
    fused = torch.cat([torch.zeros(2, 6), full[4:8]])
    shard = Shard.of_rows(Box("w", (4, 0), (8, 6)), "fused", row_start=2)
    assert torch.equal(shard.view({"fused": fused}), full[4:8])
    assert torch.equal(shard.view({"fused": fused}, Box("w", (5, 2), (7, 4))), full[5:7, 2:4])
