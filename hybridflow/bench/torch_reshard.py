"""torch's own ways from one layout to another as rivals: DTensor's `redistribute`, and a distributed checkpoint that is
saved in one and loaded in the other.

Each canonical tensor is a DTensor over the tensor ranks of the stage that has it. A DTensor never leaves its mesh, so
that `redistribute` cannot serve pipelines; the checkpoint can. Its files lie in memory where there is a file system in
memory.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as Cut

from hybridflow.bench.reshard_case import Case, Rival, Storages, empty_storages, filled, plain
from hybridflow.parallel.mesh import Grid
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.world import World


def redistributed(case: Case, world: World, weights: Storages) -> Rival | None:
    """From tensor ranks to replicas of fewer tensor ranks; None for pipelines. Collective."""
    if case.train.pp > 1 or case.generate.pp > 1:
        return None
    tp, dp = case.generate.tp, case.generate.dp
    # Neighbours gather: then it moves least, and needs one all-gather for each tensor.
    grid = Grid(case.generate, tuple(part * dp + replica for replica in range(dp) for part in range(tp)))
    source, wanted = plain(case.train_map), plain(case.map_of(grid))
    mesh = init_device_mesh("cpu", (tp, dp))
    have, result = filled(source.shards(world.rank), weights), {}
    dims = _cut_dims(source)
    before = {name: _dtensor(local, case.shapes[name], mesh, (_once(dims[name]),) * 2) for name, local in have.items()}

    def run() -> None:
        for name, tensor in before.items():
            result[name] = tensor.redistribute(placements=(_once(dims[name]), Replicate())).to_local()

    run()
    gathered = sum(local.nbytes * (dp - 1) for name, local in have.items() if dims[name] is not None)
    return Rival(run, wanted, result, (), gathered)


def checkpointed(case: Case, world: World, weights: Storages, folder: str) -> Rival:
    """Saved by the training ranks into `folder`, loaded by the generation ranks. Collective."""
    source, wanted = plain(case.train_map), plain(case.map_of(Grid.of(case.generate)))
    have, own = filled(source.shards(world.rank), weights), empty_storages(wanted.shards(world.rank))
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=("other", "tp"))["tp"]
              for shape in ((case.train.pp * case.train.dp, case.train.tp), (case.generate.dp, case.generate.tp))]
    states = [{name: _dtensor(local, case.shapes[name], mesh, (_once(dims[name]),)) for name, local in held.items()}
              for held, mesh, dims in zip((have, own), meshes, map(_cut_dims, (source, wanted)))]

    def run() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(states[0], checkpoint_id=folder)
            dcp.load(states[1], checkpoint_id=folder)

    return Rival(run, wanted, own, tuple(own.values()), sum(local.nbytes for local in own.values()))


def memory_folder() -> str | None:
    """A file system in memory; None where there is none, for the usual place of temporary files."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


def _cut_dims(of: ShardMap) -> dict[str, int | None]:
    """The dimension in which each tensor is cut; None for whole ones."""
    dims: dict[str, int | None] = {}
    for rank in of.ranks:
        for shard in of.shards(rank):
            cut = (dim for dim, (part, whole) in enumerate(zip(shard.box.shape, of.shapes[shard.box.name]))
                   if part != whole)
            dims[shard.box.name] = next(cut, None)
    return dims


def _once(dim: int | None) -> Placement:
    return Replicate() if dim is None else Cut(dim)


def _dtensor(local: Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)
