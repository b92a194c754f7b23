"""Optimizer state as boxes: where each canonical tensor's master, moments and gradient lie in the flat shares of ranks.

Owns the geometry that turns the ShardMap of parameters into one of their state, so that checkpoints and reshards
address it like weights. Pure metadata but for `gather_layouts`; it never holds a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch.distributed as dist

from hybridflow.parallel.arithmetic import ceil_div
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.world import World


class StateKind(Enum):
    """What is kept of each parameter, in fp32 at least."""

    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    MAIN_GRAD = "main_grad"


OPTIMIZER_STATE = (StateKind.MASTER, StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)


@dataclass(frozen=True)
class FlatPlace:
    """Where one parameter lies: its element 0 is element `first` of bucket `bucket`, of which the rank keeps the share
    `[start, end)` (possibly nothing of this parameter).
    """

    bucket: int
    first: int
    start: int
    end: int


FlatLayout = Mapping[str, FlatPlace]  # of one rank, by parameter name


def state_name(kind: StateKind, canonical: str) -> str:
    """The name of a state tensor, of the shape of its canonical weight. Example: `master/model.norm.weight`."""
    return f"{kind.value}/{canonical}"


def storage_name(kind: StateKind, bucket: int) -> str:
    """The name of a flat share `[end - start]`. Example: `exp_avg.3`."""
    return f"{kind.value}.{bucket}"


def state_map(weights: ShardMap, layouts: Mapping[int, FlatLayout],
              kinds: Sequence[StateKind] = OPTIMIZER_STATE) -> ShardMap:
    """The map of what `kinds` say, on the ranks of `weights`.

    Args:
        weights: of the parameters; its storages are parameter names. Those without a place (frozen) have no state.
        layouts: of every rank that will be asked about.
    Returns:
        canonical tensors under `state_name`, in storages under `storage_name`: those of `ShardedAdamW.storages()` and
        `MainGrads.storages()`. A share of a matrix is at most three boxes.
    """
    shapes = {state_name(kind, name): shape for kind in kinds for name, shape in weights.shapes.items()}

    def shards_of(rank: int) -> list[Shard]:
        layout = layouts[rank]
        return [_of_kind(kind, layout[weight.storage], part, weight)
                for weight in weights.shards(rank) if weight.storage in layout
                for part in parts_in_share(weight, layout[weight.storage]) for kind in kinds]

    return ShardMap(shapes, weights.ranks, shards_of)


def gather_layouts(layout: FlatLayout, world: World) -> dict[int, FlatLayout]:
    """Every rank's layout. Collective over the world."""
    if world.size == 1:
        return {world.rank: layout}
    gathered: list[tuple[int, FlatLayout]] = [(-1, {})] * world.size
    dist.all_gather_object(gathered, (world.rank, dict(layout)), group=world.everyone)
    return dict(gathered)


def parts_in_share(weight: Shard, place: FlatPlace) -> list[Box]:
    """The parts of a shard whose elements lie in the share, in the order of memory."""
    lo, hi = place.start - place.first, place.end - place.first  # as positions in the parameter
    return [Box(weight.box.name, tuple(first), tuple(last))
            for first, last in _parts(weight, list(weight.box.lo), 0, lo, hi)]


def position(weight: Shard, at: Sequence[int]) -> int:
    """Where element `at` of the canonical tensor lies in the parameter."""
    return weight.offset + sum((i - lo) * s for i, lo, s in zip(at, weight.box.lo, weight.strides, strict=True))


def _of_kind(kind: StateKind, place: FlatPlace, part: Box, weight: Shard) -> Shard:
    box = Box(state_name(kind, part.name), part.lo, part.hi)
    offset = place.first + position(weight, part.lo) - place.start
    return Shard(box, storage_name(kind, place.bucket), offset, weight.strides)


def _parts(weight: Shard, at: list[int], dim: int, lo: int, hi: int) -> Iterator[tuple[list[int], list[int]]]:
    """Boxes (lo, hi) of the elements at positions `[lo, hi)`, with the dims before `dim` fixed to those of `at`.

    Whole slices along `dim` make one box; a slice cut at either end is looked into. Strides must nest: a slice ends
    before the next one starts, as in any view of rows.
    """
    stride, box = weight.strides[dim], weight.box
    inside = list(zip(box.shape[dim + 1 :], weight.strides[dim + 1 :], strict=True))
    span = 1 + sum((size - 1) * step for size, step in inside)
    assert box.shape[dim] == 1 or span <= stride, (weight, dim)
    base = position(weight, [*at[:dim], *box.lo[dim:]])
    count = box.shape[dim]
    touched = range(max(0, (lo - base - span) // stride + 1), min(count, ceil_div(hi - base, stride)))
    whole = range(max(touched.start, ceil_div(lo - base, stride)), min(touched.stop, (hi - base - span) // stride + 1))
    if whole.start >= whole.stop:
        whole = range(touched.stop, touched.stop)

    def cut(i: int) -> Iterator[tuple[list[int], list[int]]]:
        return _parts(weight, [*at[:dim], box.lo[dim] + i, *box.lo[dim + 1 :]], dim + 1, lo, hi)

    for i in range(touched.start, whole.start):
        yield from cut(i)
    if whole.start < whole.stop:
        first = [*at[:dim], box.lo[dim] + whole.start, *box.lo[dim + 1 :]]
        yield first, [*(i + 1 for i in at[:dim]), box.lo[dim] + whole.stop, *box.hi[dim + 1 :]]
    for i in range(whole.stop, touched.stop):
        yield from cut(i)
