"""A toy model over (tp, pp, data) with one parameter of each kind, and the same model whole.

Losses are sums of 0.5 c (p - 1)^2 with random c for each (parameter, step, micro-batch, data rank, part), so that every
gradient depends on the steps before it. Parts are contributions of different ranks to one shared parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridflow.parallel.box import Box, Shard
from hybridflow.parallel.gradients import GradSync
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.shard_map import ShardMap

SHAPES = {"cut": (6, 25), "tied": (7, 5), "norm": (5,), "bias": (5,)}
MICRO_BATCHES = 3


def random(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def start(name: str) -> Tensor:
    return random(list(SHAPES).index(name), SHAPES[name])


def factors(name: str, step: int, micro_batch: int, dp: int, part: int) -> Tensor:
    place = ((list(SHAPES).index(name) * 10 + step) * 10 + micro_batch) * 10 + dp
    return random(1000 + place * 10 + part, SHAPES[name])


def num_parts(name: str, layout: Layout) -> int:
    """Ranks of one replica that contribute to a shared parameter: tp ranks to `norm`, both end stages to `tied`."""
    return {"norm": layout.tp, "tied": min(layout.pp, 2)}.get(name, 1)


def held(stage: int, pp: int) -> list[str]:
    """The parameters of a stage."""
    homes = {"cut": {0}, "tied": {0, pp - 1}, "norm": {1 % pp}, "bias": {2 % pp}}
    return [name for name in SHAPES if stage in homes[name]]


def toy_shard_map(grid: Grid) -> ShardMap:
    """Where the parameters of every rank's `ToyStage` lie."""
    def shards_of(rank: int) -> list[Shard]:
        at, tp = grid.coord(rank), grid.layout.tp
        boxes = {name: Box.whole(name, shape) for name, shape in SHAPES.items()}
        rows = SHAPES["cut"][0] // tp
        boxes["cut"] = Box("cut", (at.tp * rows, 0), ((at.tp + 1) * rows, SHAPES["cut"][1]))
        return [Shard.of_rows(boxes[name], name) for name in held(at.pp, grid.layout.pp)]

    return ShardMap(dict(SHAPES), grid.ranks, shards_of)


class ToyStage(nn.Module):
    """`cut` is cut by rows over tp; `norm` gets a part of its gradient on each tp rank; `bias` is computed alike on
    all of them; `tied` is on the first and the last stage. The others have one stage each.
    """

    def __init__(self, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.mesh = mesh
        for name in held(mesh.pp.index, mesh.pp.size):
            self.register_parameter(name, nn.Parameter(self.local(name, start(name)).to(dtype)))

    def local(self, name: str, full: Tensor) -> Tensor:
        return full.chunk(self.mesh.tp.size)[self.mesh.tp.index].clone() if name == "cut" else full

    def syncs(self) -> dict[str, GradSync]:
        mesh, first_tp = self.mesh, self.mesh.tp.index == 0
        syncs = {
            "norm": GradSync((mesh.tp,), counted=first_tp),
            "bias": GradSync(counted=first_tp),
            "tied": GradSync((mesh.embedding,), counted=first_tp and mesh.is_first_stage),
        }
        return {name: sync for name, sync in syncs.items() if name in dict(self.named_parameters())}

    def loss(self, step: int, micro_batch: int) -> Tensor:
        mesh, total = self.mesh, torch.zeros((), dtype=torch.float64)
        for name, param in self.named_parameters():
            part = {"norm": mesh.tp.index, "tied": int(not mesh.is_first_stage)}.get(name, 0)
            c = self.local(name, factors(name, step, micro_batch, mesh.data.index, part))
            total = total + 0.5 * (c * (param - 1.0).square()).sum()
        return total


class ToyWhole(nn.Module):
    """The same model on one process; its loss sums what all ranks of `layout` contribute."""

    def __init__(self) -> None:
        super().__init__()
        for name in SHAPES:
            self.register_parameter(name, nn.Parameter(start(name)))

    def backward(self, step: int, layout: Layout, num_micro_batches: int = MICRO_BATCHES) -> None:
        self.zero_grad()
        for name, param in self.named_parameters():
            c = sum(factors(name, step, m, d, part)
                    for m in range(num_micro_batches) for d in range(layout.dp * layout.cp)
                    for part in range(num_parts(name, layout)))
            (0.5 * (c * (param - 1.0).square()).sum()).backward()

    def adam(self, weight_decay: float, lr: float, betas: tuple[float, float]) -> torch.optim.AdamW:
        groups = [{"params": [p for p in self.parameters() if (p.dim() < 2) == plain],
                   "weight_decay": 0.0 if plain else weight_decay} for plain in (False, True)]
        return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=False)
