"""What open RL code does between two layouts: every tensor whole on every rank, one by one, from which a rank cuts its
own part.

A storage of one stage is broadcast along the pipeline, then gathered from the tensor ranks, put together under its
canonical names, and cut.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist

from hybridflow.bench.reshard_case import DTYPE, Case, Rival, Storages, empty_storages
from hybridflow.parallel.box import Shard
from hybridflow.parallel.mesh import Coord, Grid
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.world import World


def all_gather(case: Case, world: World, training: Storages) -> Rival:
    """The rival, for one training replica and its ranks. Collective."""
    grid = Grid.of(case.train)
    at = grid.coord(world.rank)
    along = {axis: _my_group(grid, world, axis) for axis in ("tp", "pp")}
    source, wanted = case.train_map, case.map_of(Grid.of(case.generate))
    mine: dict[str, list[Shard]] = defaultdict(list)
    for shard in wanted.shards(world.rank):
        mine[shard.box.name].append(shard)
    own = empty_storages(wanted.shards(world.rank))
    # By stage and storage, the shards of each tensor rank: `shards[tp]`.
    stages = [{storage: [_of(source, _rank(grid, stage, tp), storage) for tp in range(case.train.tp)]
               for storage in dict.fromkeys(shard.storage for shard in source.shards(_rank(grid, stage, 0)))}
              for stage in range(case.train.pp)]

    def one(stage: int, storage: str, shards: list[list[Shard]]) -> None:
        part = training[storage] if stage == at.pp else empty_storages(shards[0])[storage]
        if along["pp"] is not None:
            dist.broadcast(part, _rank(grid, stage, at.tp), group=along["pp"])
        parts = [part]
        if along["tp"] is not None and shards[0] != shards[1]:  # else every tensor rank has all of it
            parts = [torch.empty_like(part) for _ in shards]
            dist.all_gather(parts, part, group=along["tp"])
        for name in dict.fromkeys(shard.box.name for shard in shards[0]):
            whole = torch.empty(case.shapes[name], dtype=DTYPE)
            for gathered, held in zip(parts, shards):
                for shard in held:
                    if shard.box.name == name:
                        whole[shard.box.slices].copy_(shard.view({storage: gathered}))
            for shard in mine[name]:
                shard.view(own).copy_(whole[shard.box.slices])

    def run() -> None:
        for stage, storages in enumerate(stages):
            for storage, shards in storages.items():
                one(stage, storage, shards)

    held = sum(storage.nbytes for storage in training.values())
    return Rival(run, wanted, own, tuple(own.values()), case.model_bytes - held)


def _of(source: ShardMap, rank: int, storage: str) -> list[Shard]:
    return [shard for shard in source.shards(rank) if shard.storage == storage]


def _rank(grid: Grid, stage: int, tp: int) -> int:
    return next(rank for rank in grid.ranks if grid.coord(rank) == Coord(tp=tp, pp=stage))


def _my_group(grid: Grid, world: World, axis: str) -> dist.ProcessGroup | None:
    """The ranks that differ from mine along `axis` only. Collective."""
    mine = None
    for line in grid.lines(lambda c: (c.pp,) if axis == "tp" else (c.tp,)):
        group = world.group(line, f"gathered {axis}")
        mine = group if world.rank in line else mine
    return mine
