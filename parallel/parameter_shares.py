"""The parameters as the optimizer leaves them: of every flat bucket, on each rank, the share that this rank steps.

Owns the ShardMap of these shares, from which new weights can be sent on before (or instead of) the all-gather. Pure
metadata but for one exchange of layouts; it never holds a tensor and never steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from operator import add

import torch.distributed as dist

from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.mesh import Grid, Mesh
from hybridflow.parallel.shard_map import Division, ShardMap
from hybridflow.parallel.state_map import FlatLayout, FlatPlace, parts_in_share, position

ModelKind = tuple[int, int]  # of ranks with the same weights: (tp, pp)
Kind = tuple[int, int, int]  # of ranks with the same share of them: (tp, pp, number of the share)


def share_storage(bucket: int) -> str:
    """The name of this rank's share of a bucket's parameters, `[end - start]`. Example: `share.3`."""
    return f"share.{bucket}"


def share_map(weights: ShardMap, mine: FlatLayout, mesh: Mesh, sharded: bool) -> ShardMap:
    """Where the shares of all ranks have which boxes of the canonical tensors. Collective over each replica's ranks.

    Args:
        weights: of the parameters on `mesh`; its storages are parameter names. Those without a place in a bucket
            (frozen) are not in shares: they stay where `weights` has them.
        mine: this rank's `MainGrads.layout()`. Data-parallel ranks have the same but for their shares.
        sharded: whether the data-parallel ranks share the buckets out; else each has all of them.
    Returns:
        canonical tensors under their own names, in storages under `share_storage`. Ranks with the same share of the
        same weights are of one kind; a share of a matrix is at most three boxes.
    """
    return divided_map(weights, _gather(mine, mesh), mesh.grid, sharded)


def divided_map(weights: ShardMap, layouts: Mapping[ModelKind, FlatLayout], grid: Grid, sharded: bool) -> ShardMap:
    """As `share_map`, for who knows the layout of the first data-parallel rank of each (tp, pp)."""
    num_shares = grid.layout.dp * grid.layout.cp if sharded else 1

    def model_kind_of(rank: int) -> ModelKind:
        at = grid.coord(rank)
        return at.tp, at.pp

    def kind_of(rank: int) -> Kind:
        at = grid.coord(rank)
        return at.tp, at.pp, at.dp * grid.layout.cp + at.cp if sharded else 0  # as `Mesh.data` orders its ranks

    def shards_of(rank: int) -> list[Shard]:
        tp, pp, share = kind_of(rank)
        return [shard for weight in weights.shards(rank)
                for shard in _in_share(weight, layouts[tp, pp].get(weight.storage), share)]

    def parts_of(kind: ModelKind, place: int) -> dict[Kind, list[Shard]]:
        weight = whole.shards(whole.kinds[kind][0])[place]
        home = layouts[kind].get(weight.storage)
        if home is None:  # frozen
            return {(*kind, share): [weight] for share in range(num_shares)}
        alike = Shard(Box.whole("", weight.box.shape), "", weight.offset, weight.strides)
        return {(*kind, share): [_moved(part, weight.box) for part in parts] for share, parts in divide(alike, home)}

    divide = cache(_by_share)  # layers, and what tensor ranks have of them, are much alike
    whole = ShardMap(weights.shapes, weights.ranks, lambda rank: list(weights.shards(rank)), model_kind_of)
    return ShardMap(weights.shapes, weights.ranks, shards_of, kind_of, Division(whole, parts_of))


def _gather(mine: FlatLayout, mesh: Mesh) -> dict[tuple[int, int], FlatLayout]:
    """By (tp, pp) the layout that the first of the data-parallel ranks has."""
    at = mesh.coord.tp, mesh.coord.pp
    first = {name: replace(place, start=0, end=place.end - place.start) for name, place in mine.items()}
    if mesh.model.size == 1:
        return {at: first}
    gathered: list[tuple[tuple[int, int], FlatLayout]] = [(at, {})] * mesh.model.size
    dist.all_gather_object(gathered, (at, first), group=mesh.model.process_group)
    return dict(gathered)


def _by_share(weight: Shard, place: FlatPlace) -> list[tuple[int, list[Shard]]]:
    """What shares have of a parameter, each with its number; those that have nothing of it are left out."""
    first, last = (place.first + position(weight, at) for at in (weight.box.lo, [hi - 1 for hi in weight.box.hi]))
    size = _size(place)
    return [(share, _in_share(weight, place, share)) for share in range(first // size, last // size + 1)]


def _moved(part: Shard, box: Box) -> Shard:
    """A part of the box at the origin, as that of `box`."""
    lo, hi = tuple(map(add, box.lo, part.box.lo)), tuple(map(add, box.lo, part.box.hi))
    return Shard(Box(box.name, lo, hi), part.storage, part.offset, part.strides)


def _in_share(weight: Shard, place: FlatPlace | None, share: int) -> list[Shard]:
    """What the share with this number has of a parameter; a frozen parameter's shard as it is."""
    if place is None:
        return [weight]
    size = _size(place)
    mine = replace(place, start=share * size, end=(share + 1) * size)
    return [Shard(part, share_storage(place.bucket), place.first + position(weight, part.lo) - mine.start,
                  weight.strides) for part in parts_in_share(weight, mine)]


def _size(place: FlatPlace) -> int:
    """Elements of a share of the bucket."""
    return place.end - place.start
