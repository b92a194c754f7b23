"""megatron-core's resharding planner and its point-to-point service as a rival, also on a CPU.

The only module that imports megatron-core's resharding. The planner asks a module for its parameters, what of each is
cut, and for the process groups; all of that is made here as megatron-core's own GPT model has it (query, key and value
rows interleaved by group of heads, gate over up), on ranks in its own order, so that no bytes differ. The service is
written for CUDA streams: while it runs, and only then, they are stand-ins without a device.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.bench.reshard_case import Case, Rival, Storages, empty_storages, filled
from hybridflow.models.config import ModelConfig
from hybridflow.models.weights import EMBEDDING, LM_HEAD
from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.mesh import Grid, Layout
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.world import World

# Which dimension of a parameter is cut for tensor ranks, and into how many runs of rows on one rank.
CUT = {"word_embeddings": (0, 1), "linear_qkv": (0, 1), "linear_proj": (1, 1), "linear_fc1": (0, 2),
       "linear_fc2": (1, 1), "output_layer": (0, 1)}


def megatron(case: Case, world: World, weights: Storages) -> Rival:
    """The rival, with its own model in either layout. Collective.

    Raises:
        ImportError: megatron-core is not installed, or has no resharding (before 0.16).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that faster kernels are not installed: none of them is on this path
        from megatron.core.resharding import build_centralized_reshard_plan, execute_reshard_plan
        from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService

    maps = [megatron_map(case, Grid.of(layout)) for layout in (case.train, case.generate)]
    have, want = (of.shards(world.rank) for of in maps)
    held, own = filled(have, weights), empty_storages(want)
    source, target = (_module(case.model, layout, world, storages)
                      for layout, storages in ((case.train, held), (case.generate, own)))
    plan = build_centralized_reshard_plan(source, target)
    with _no_streams():
        service = NCCLCopyService()

    def run() -> None:
        with _no_streams():
            execute_reshard_plan(plan, source, target, service)

    received = sum(own[op.param_name][op.my_slice].nbytes for op in plan.recv_ops if op.peer_rank != world.rank)
    return Rival(run, maps[1], own, tuple(own.values()), received)


def megatron_map(case: Case, grid: Grid) -> ShardMap:
    """Where canonical tensors lie in megatron-core's model: its parameters' names, layers counted from 0 on each stage.
    """
    def shards_of(rank: int) -> list[Shard]:
        return _shards(case, grid, rank)
    return ShardMap(case.shapes, grid.ranks, shards_of)


def _shards(case: Case, grid: Grid, rank: int) -> list[Shard]:
    model, layout, at = case.model, grid.layout, grid.coord(rank)
    per_stage = model.num_layers // layout.pp
    shards = []

    def add(name: str, storage: str, box: Box | None = None, row: int = 0) -> int:
        whole = Box.whole(name, case.shapes[name])
        shards.append(Shard.of_rows(box or whole, f"{storage}.weight", row))
        return row + shards[-1].box.shape[0]

    def part(name: str, dim: int) -> Box:
        shape = case.shapes[name]
        size = shape[dim] // layout.tp
        lo, hi = [0] * len(shape), list(shape)
        lo[dim], hi[dim] = at.tp * size, (at.tp + 1) * size
        return Box(name, tuple(lo), tuple(hi))

    if at.pp == 0:
        add(EMBEDDING, "embedding.word_embeddings", part(EMBEDDING, 0))
    for local in range(per_stage):
        canonical, name = f"model.layers.{at.pp * per_stage + local}", f"decoder.layers.{local}"
        add(f"{canonical}.input_layernorm.weight", f"{name}.input_layernorm")
        row = 0
        for head in range(at.tp * model.num_kv_heads // layout.tp, (at.tp + 1) * model.num_kv_heads // layout.tp):
            for kind, heads in (("q", model.num_heads // model.num_kv_heads), ("k", 1), ("v", 1)):
                rows = heads * model.head_dim
                box = Box(f"{canonical}.self_attn.{kind}_proj.weight", (head * rows, 0),
                          ((head + 1) * rows, model.hidden_size))
                row = add(box.name, f"{name}.self_attention.linear_qkv", box, row)
        out, down = f"{canonical}.self_attn.o_proj.weight", f"{canonical}.mlp.down_proj.weight"
        add(out, f"{name}.self_attention.linear_proj", part(out, 1))
        add(f"{canonical}.post_attention_layernorm.weight", f"{name}.pre_mlp_layernorm")
        row = 0
        for kind in ("gate", "up"):
            box = part(f"{canonical}.mlp.{kind}_proj.weight", 0)
            row = add(box.name, f"{name}.mlp.linear_fc1", box, row)
        add(down, f"{name}.mlp.linear_fc2", part(down, 1))
    if at.pp == layout.pp - 1:
        add("model.norm.weight", "decoder.final_layernorm")
        add(LM_HEAD, "output_layer", part(LM_HEAD, 0))
    return shards


def _module(model: ModelConfig, layout: Layout, world: World, storages: Storages) -> nn.Module:
    """A module with these parameters, and what megatron-core writes on them. Collective."""
    root = nn.Module()
    root.pg_collection = _groups(Grid.of(layout), world)
    at = Grid.of(layout).coord(world.rank)
    first = at.pp * (model.num_layers // layout.pp)
    for name, storage in storages.items():
        *path, leaf = name.split(".")
        at_module = root
        for depth, step in enumerate(path):
            if step not in at_module._modules:
                at_module.add_module(step, nn.Module())
                if path[depth - 1] == "layers":
                    at_module._modules[step].layer_number = first + int(step) + 1
            at_module = at_module._modules[step]
        at_module.register_parameter(leaf, _parameter(storage, path[-1]))
    return root


def _parameter(storage: Tensor, kind: str) -> nn.Parameter:
    parameter = nn.Parameter(storage, requires_grad=False)
    if kind in CUT:
        parameter.tensor_model_parallel = True
        parameter.partition_dim, parameter.partition_stride = CUT[kind]
    return parameter


def _groups(grid: Grid, world: World) -> SimpleNamespace:
    """Process groups under megatron-core's names, also those of one rank. Collective."""
    keys = {"tp": lambda c: (c.dp, c.pp), "dp": lambda c: (c.tp, c.pp), "pp": lambda c: (c.tp, c.dp)}
    groups = SimpleNamespace(ep=None, expt_tp=None)
    for axis, key in keys.items():
        for line in grid.lines(key):
            group = world.group(line, f"megatron {axis}") or dist.new_group(list(line))
            if world.rank in line:
                setattr(groups, axis, group)
    return groups


class _NoStream:
    """A CUDA stream that has nothing to wait for."""

    def wait_stream(self, other: object) -> None:
        pass


@contextlib.contextmanager
def _no_streams() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    with contextlib.ExitStack() as patches:
        for target, stand_in in (("torch.cuda.Stream", _NoStream), ("torch.cuda.current_stream", _NoStream),
                                 ("torch.cuda.stream", lambda stream: contextlib.nullcontext())):
            patches.enter_context(mock.patch(target, stand_in))
        yield
