"""Our side of `bench reshard`, and the bare wire that it is measured by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

from hybridflow.bench.reshard_case import DTYPE, Case, Rival, Storages, empty_storages
from hybridflow.parallel.assign import assign
from hybridflow.parallel.mesh import Grid
from hybridflow.parallel.nodes import Nodes
from hybridflow.parallel.plan import TransferPlan
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.share import TRAINING, rest_shapes, shared_map
from hybridflow.parallel.transfer import DEFAULT_BUCKET_BYTES, Transfer
from hybridflow.parallel.world import World


def assigned(case: Case, tp_within_node: bool = False) -> Grid:
    """Where each rank sits while it generates, as the hybrid engine chooses it."""
    return assign(case.train_map, Grid.of(case.train), case.generate, case.map_of, nodes=case.nodes,
                  tp_within_node=tp_within_node)


def shared(case: Case, grid: Grid, world: World, training: Storages) -> Rival:
    """Generation weights that lie in training memory as far as they are there, with memory for the rest only."""
    wanted = shared_map(case.train_map, case.map_of(grid))
    rest = {name: torch.full(shape, torch.nan, dtype=DTYPE)
            for name, shape in rest_shapes(case.train_map, case.map_of(grid), world.rank).items()}
    result = {f"{TRAINING}{name}": storage for name, storage in training.items()} | rest
    return _by_transfer(case, world, training, wanted, result, rest)


def packed(case: Case, grid: Grid, world: World, training: Storages) -> Rival:
    """Generation weights in memory of their own, in which what a rank has already is copied too."""
    wanted = case.map_of(grid)
    own = empty_storages(wanted.shards(world.rank))
    return _by_transfer(case, world, training, wanted, own, own)


def _by_transfer(case: Case, world: World, training: Storages, wanted: ShardMap, result: Storages, own: Storages,
                 ) -> Rival:
    plan = TransferPlan(case.train_map, wanted, case.nodes)
    transfer = Transfer(plan, world, wire_dtype=DTYPE, bucket_bytes=DEFAULT_BUCKET_BYTES)

    def run() -> None:
        for number in range(transfer.num_rounds):
            transfer.round(number, training, result)

    return Rival(run, wanted, result, tuple(own.values()), plan.received_numel(world.rank) * DTYPE.itemsize)


def raw_wire(plan: TransferPlan, world: World, far: Nodes | None = None) -> Callable[[], None]:
    """The bytes of a plan and nothing else: one flat message for each (source, destination), from and into memory that
    is there.

    Args:
        far: only what travels between two of these nodes; None for all.
    """
    outgoing, incoming = Counter[int](), Counter[int]()
    for copy in plan.of_rank(world.rank):
        if copy.source != copy.dest and (far is None or far.of(copy.source) != far.of(copy.dest)):
            outgoing[copy.dest] += copy.box.numel * (copy.source == world.rank)
            incoming[copy.source] += copy.box.numel * (copy.dest == world.rank)
    messages = [(operation, torch.ones(numel, dtype=DTYPE), peer)  # zeros may all be one page, which is read for free
                for operation, sizes in ((dist.irecv, incoming), (dist.isend, outgoing))
                for peer, numel in sorted(sizes.items()) if numel]

    def run() -> None:
        ops = [dist.P2POp(operation, buffer, peer) for operation, buffer, peer in messages]
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()

    run()  # touches the memory
    return run
