"""Cells: the smallest regions that move as a whole, found from the boxes of two ShardMaps.

Owns the geometry: a cell lies in one piece of the source's boxes and one of the destination's, so the same kinds of
rank hold all of it and the same kinds want all of it. Looks at kinds of ranks only, and chooses no sender.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import ge, le

from hybridflow.parallel.arithmetic import ceil_div
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.routes import Turn
from hybridflow.parallel.shard_map import Division, ShardMap

Kind = Hashable

MIN_CUT = 1 << 14  # elements: less is not worth a message more
CUT_PRECISION = 8  # turns may be longer or shorter than they should by one in so many


@dataclass(frozen=True, slots=True)
class Placed:
    """A shard and its place in its owner's list; where shards are divided, that of the whole one and the number of the
    part.
    """

    place: tuple[int, int]
    shard: Shard


Owners = dict[Kind, tuple[Placed, ...]]  # the kinds of rank that have a box, and in which of their shards


@dataclass(frozen=True, slots=True)
class Piece:
    """A region inside every box that it touches, and who has it; the pieces of one tensor are disjoint."""

    box: Box
    owners: Owners = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Cell:
    """`box` lies in one source piece, whose `holders` have it, and in one destination piece, whose `wanters` want it.

    Example: tp 2 -> tp 1 of an 8 x 6 matrix: two cells of 4 x 6, each held by one kind and wanted by the only other.
    """

    box: Box
    holders: Owners = field(repr=False, compare=False)
    wanters: Owners = field(repr=False, compare=False)


def find_cells(src: ShardMap, dst: ShardMap) -> list[Cell]:
    """All cells, tensor by tensor in the order of `dst.shapes`.

    Raises:
        ValueError: canonical shapes differ, a box lies outside its tensor, or no rank holds a destination box (all are
            listed).
    """
    _check_shapes(src, dst)
    held, wanted = _boxes(src), _boxes(dst)
    _check_boxes(held, src, "source")
    _check_boxes(wanted, dst, "destination")
    cells: list[Cell] = []
    lost: list[str] = []
    for name in dst.shapes:
        index = _RowIndex(disjoint(held.get(name, {})))
        for piece in disjoint(wanted.get(name, {})):
            found = [Cell(box, near.owners, piece.owners) for near, box in index.parts(piece.box)]
            cells += found
            if sum(cell.box.numel for cell in found) < piece.box.numel:
                lost += _lost(piece, found, dst)
    if lost:
        raise ValueError(f"no rank holds {len(lost)} destination boxes: {'; '.join(lost[:5])}")
    return cells


def divided(cells: Iterable[Cell], division: Division) -> Iterator[Cell]:
    """Cells of `division.whole` as those of the parts that its shards were divided into.

    Only shards that hold one of these cells are looked at.
    """
    pieces_of: dict[Hashable, _RowIndex] = {}
    for cell in cells:
        whole = tuple((kind, placed.place[0]) for kind, all_placed in cell.holders.items() for placed in all_placed)
        if whole not in pieces_of:
            pieces_of[whole] = _RowIndex(_pieces_of_parts(whole, division))
        parts = pieces_of[whole].parts(cell.box)
        assert sum(box.numel for _, box in parts) == cell.box.numel, cell
        for piece, box in parts:
            yield Cell(box, piece.owners, cell.wanters)


def in_turns(cells: Sequence[Cell], num_turns: int) -> Iterator[tuple[Turn, Cell]]:
    """Cells in their order, each with its turn: turns are equally long stretches of all elements, end to end.

    A cell that reaches over the end of a turn is cut there, unless that would cut off little. Fewer turns than asked
    for are made of little.
    """
    if num_turns == 1:
        yield from ((Turn(0, 1), cell) for cell in cells)
        return
    total = sum(cell.box.numel for cell in cells)
    num_turns = min(num_turns, max(len(cells), total // MIN_CUT))
    grain = max(MIN_CUT, total // (num_turns * CUT_PRECISION))
    start = 0
    for cell in cells:
        boxes = [cell.box]
        while boxes:
            box = boxes.pop()
            end = ceil_div((start + grain) * num_turns, total) * total // num_turns - start
            if end + grain <= box.numel:
                boxes += reversed(_split(box, end, grain))
                continue
            middle = 2 * start + box.numel
            yield Turn(middle * num_turns // (2 * total), num_turns), Cell(box, cell.holders, cell.wanters)
            start += box.numel


def disjoint(boxes: Mapping[Box, Owners]) -> list[Piece]:
    """Disjoint pieces of boxes of one tensor, such that every box is a union of pieces; in ascending order.

    Boxes that are apart along some dim cannot overlap: they are sorted apart along one dim after the other, as often as
    that helps, and only what then hangs together is compared box by box.
    """
    pieces: list[Piece] = []
    for cluster in _clusters(list(boxes)):
        pieces += [Piece(cluster[0], boxes[cluster[0]])] if len(cluster) == 1 else _peel(
            {box: boxes[box] for box in cluster})
    return sorted(pieces, key=lambda piece: piece.box.lo)


def _check_shapes(src: ShardMap, dst: ShardMap) -> None:
    faults = [f"{name}: {src.shapes.get(name, 'not in the source')} -> {shape}"
              for name, shape in dst.shapes.items() if src.shapes.get(name) != shape]
    if faults:
        raise ValueError(f"source and destination disagree on {len(faults)} tensors: {'; '.join(faults[:5])}")


def _check_boxes(found: Mapping[str, Mapping[Box, Owners]], shard_map: ShardMap, which: str) -> None:
    outside = [f"{box.name}[{box.lo}:{box.hi}] of {shard_map.shapes.get(name, 'an unknown tensor')}"
               for name, boxes in found.items() for box in boxes if not _is_inside(box, shard_map.shapes.get(name))]
    if outside:
        raise ValueError(f"{len(outside)} boxes of the {which} are no part of their tensor, which must have 1 or more "
                         f"dims: {'; '.join(outside[:5])}")


def _is_inside(box: Box, shape: tuple[int, ...] | None) -> bool:
    """None: there is no such tensor."""
    return (shape is not None and 0 < len(shape) == len(box.lo) == len(box.hi)
            and all(0 <= lo <= hi <= size for lo, hi, size in zip(box.lo, box.hi, shape)))


def _boxes(shard_map: ShardMap) -> dict[str, dict[Box, Owners]]:
    """For each canonical tensor its distinct boxes and who has them."""
    found: dict[str, dict[Box, Owners]] = {}
    for kind, ranks in shard_map.kinds.items():
        for place, shard in enumerate(shard_map.shards(ranks[0])):
            owners = found.setdefault(shard.box.name, {}).setdefault(shard.box, {})
            owners[kind] = (*owners.get(kind, ()), Placed((place, 0), shard))
    return found


def _pieces_of_parts(whole: Sequence[tuple[Kind, int]], division: Division) -> list[Piece]:
    """Of the parts of these shards, each a kind and a place in its list; in ascending order."""
    owned = [(owner, Placed((place, number), shard)) for kind, place in whole
             for owner, shards in division.parts_of(kind, place).items() for number, shard in enumerate(shards)]
    if len(whole) == 1 and len({placed.shard.box.lo for _, placed in owned}) == len(owned):  # disjoint and in order
        return [Piece(placed.shard.box, {owner: (placed,)}) for owner, placed in owned]
    found: dict[Box, Owners] = {}
    for owner, placed in owned:
        owners = found.setdefault(placed.shard.box, {})
        owners[owner] = (*owners.get(owner, ()), placed)
    return disjoint(found)


def _clusters(boxes: list[Box]) -> Iterator[list[Box]]:
    """Boxes in clusters; boxes of different clusters do not overlap."""
    for dim in range(len(boxes[0].lo) if len(boxes) > 1 else 0):
        runs = _runs(boxes, dim)
        if len(runs) > 1:
            for run in runs:
                yield from _clusters(run)
            return
    if boxes:
        yield boxes


def _runs(boxes: list[Box], dim: int) -> list[list[Box]]:
    """Boxes in runs that hang together along a dim, ascending."""
    runs: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: (box.lo[dim], box.lo, box.hi)):
        if box.lo[dim] >= end:
            runs.append([])
        runs[-1].append(box)
        end = max(end, box.hi[dim])
    return runs


def _split(box: Box, at: int, grain: int) -> list[Box]:
    """`box` in parts, of which none reaches over its element number `at` (in row-major order) by `grain` or more."""
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    row_numel = box.numel // box.shape[dim]
    row, rest = divmod(at, row_numel)
    if min(rest, row_numel - rest) < grain:
        row += 2 * rest >= row_numel
        return [*_rows(box, dim, 0, row), *_rows(box, dim, row, box.shape[dim])]
    [inner] = _rows(box, dim, row, row + 1)
    return [*_rows(box, dim, 0, row), *_split(inner, rest, grain), *_rows(box, dim, row + 1, box.shape[dim])]


def _rows(box: Box, dim: int, start: int, stop: int) -> list[Box]:
    """The rows `[start, stop)` of a box along a dim; none where there are none."""
    lo, hi = list(box.lo), list(box.hi)
    lo[dim], hi[dim] = box.lo[dim] + start, box.lo[dim] + stop
    return [Box(box.name, tuple(lo), tuple(hi))] if start < stop else []


def _peel(boxes: Mapping[Box, Owners]) -> list[Piece]:
    """As `disjoint`, comparing each box with all pieces so far."""
    pieces: list[Piece] = []
    for box, owners in boxes.items():
        rest, after = [box], []
        for piece in pieces:
            common = piece.box.intersect(box)
            if common is None:
                after.append(piece)
                continue
            after.append(Piece(common, _merged(piece.owners, owners)))
            after += [Piece(part, piece.owners) for part in piece.box.subtract(common)]
            rest = [left for part in rest for left in part.subtract(common)]
        pieces = after + [Piece(part, owners) for part in rest]
    return sorted(pieces, key=lambda piece: piece.box.lo)


def _merged(first: Owners, second: Owners) -> Owners:
    return {kind: (*first.get(kind, ()), *second.get(kind, ())) for kind in (*first, *(k for k in second
                                                                                      if k not in first))}


def _lost(piece: Piece, found: list[Cell], dst: ShardMap) -> list[str]:
    missing = [piece.box]
    for cell in found:
        missing = [rest for part in missing for rest in part.subtract(cell.box)]
    rank = dst.kinds[next(iter(piece.owners))][0]
    return [f"{part.name}[{part.lo}:{part.hi}] wanted by rank {rank}" for part in missing]


def _contains(box: Box, part: Box) -> bool:
    return all(map(le, box.lo, part.lo)) and all(map(ge, box.hi, part.hi))


class _RowIndex:
    """The disjoint pieces of one tensor, found by their extent along the first dim.

    Pieces are dealt to lanes in which no two share a row, so that each lane is sorted by both ends. A table of whole
    rows has one lane; a tensor cut by columns has one for each cut.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        self._lanes: list[tuple[list[int], list[Piece]]] = []  # ends along the first dim, and pieces
        for piece in pieces:
            lane = next((lane for lane in self._lanes if lane[0][-1] <= piece.box.lo[0]), None)
            if lane is None:
                self._lanes.append(lane := ([], []))
            lane[0].append(piece.box.hi[0])
            lane[1].append(piece)

    def parts(self, box: Box) -> list[tuple[Piece, Box]]:
        """The pieces that `box` meets and what it has of each, in ascending order."""
        found: list[tuple[Piece, Box]] = []
        for ends, lane in self._lanes:
            place = bisect_right(ends, box.lo[0])
            while place < len(lane) and lane[place].box.lo[0] < box.hi[0]:
                piece = lane[place]
                common = piece.box if _contains(box, piece.box) else box.intersect(piece.box)
                if common is not None:
                    found.append((piece, common))
                place += 1
        return found if len(self._lanes) == 1 else sorted(found, key=lambda each: each[1].lo)
