"""The parameters as the optimizer leaves them: of every flat bucket, on each rank, the share that this rank steps.

Owns the ShardMap of these shares, from which new weights can be sent on before (or instead of) the all-gather. Pure
metadata but for one exchange of layouts; it never holds a tensor and never steps.
"""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from hybridflow.parallel.box import Shard
from hybridflow.parallel.mesh import Mesh
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
    layouts = _gather(mine, mesh)

    def model_kind_of(rank: int) -> ModelKind:
        at = mesh.grid.coord(rank)
        return at.tp, at.pp

    def kind_of(rank: int) -> Kind:
        at = mesh.grid.coord(rank)
        return at.tp, at.pp, at.dp * mesh.layout.cp + at.cp if sharded else 0  # as `Mesh.data` orders its ranks

    def shards_of(rank: int) -> list[Shard]:
        tp, pp, share = kind_of(rank)
        return [shard for weight in weights.shards(rank)
                for shard in _in_share(weight, layouts[tp, pp].get(weight.storage), share)]

    def parts_of(kind: ModelKind, place: int) -> dict[Kind, list[Shard]]:
        weight = whole.shards(whole.kinds[kind][0])[place]
        home = layouts[kind].get(weight.storage)
        return {(*kind, share): _in_share(weight, home, share) for share in _shares_with(weight, home, num_shares)}

    whole = ShardMap(weights.shapes, weights.ranks, lambda rank: list(weights.shards(rank)), model_kind_of)
    num_shares = mesh.layout.dp * mesh.layout.cp if sharded else 1
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


def _shares_with(weight: Shard, place: FlatPlace | None, num_shares: int) -> range:
    """The numbers of the shares that have some of a parameter; of a frozen one all ranks have all."""
    if place is None:
        return range(num_shares)
    first, last = (place.first + position(weight, at) for at in (weight.box.lo, [hi - 1 for hi in weight.box.hi]))
    return range(first // _size(place), last // _size(place) + 1)


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
