"""A toy model cut into chunks, and the same model whole: an embedding, then layers h + tanh(h W^T + b) * s.

W and b are a tensor-parallel linear's on one tensor rank, so that backwards can be split; s is a plain parameter. The
main gradients of the W are what a `WeightGrads` fills, all others are autograd's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridflow.parallel.linear import ColumnParallelLinear
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.weight_grads import WeightGrads, attach
from hybridflow.parallel.world import World

VOCAB, HIDDEN, LAYERS = 11, 3, 8
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ids:
    input_ids: Tensor


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def micro_batches(tokens: tuple[int, ...]) -> list[Ids]:
    generator = torch.Generator().manual_seed(5)
    return [Ids(torch.randint(VOCAB, (count,), generator=generator)) for count in tokens]


class Layer(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        alone = Mesh(Grid.of(Layout()), World.single(CPU)).tp
        self.linear = ColumnParallelLinear(HIDDEN, HIDDEN, bias=True, tp=alone, sequence_parallel=False,
                                           dtype=torch.float64, device=CPU)
        self.scale = nn.Parameter(random(100 + layer, HIDDEN))
        with torch.no_grad():
            self.linear.weight.copy_(random(200 + layer, HIDDEN, HIDDEN))
            self.linear.bias.copy_(random(300 + layer, HIDDEN))

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.linear(h)) * self.scale


class Stage(nn.Module):
    """The chunks of one stage. The whole model is the one stage of one chunk."""

    def __init__(self, chunks: Chunks, stage: int) -> None:
        super().__init__()
        self.chunks = chunks
        self.layers_of = {chunk: range(chunk * LAYERS // chunks.count, (chunk + 1) * LAYERS // chunks.count)
                          for chunk in chunks.of_stage(stage)}
        self.embed = nn.Parameter(random(6, VOCAB, HIDDEN)) if 0 in self.layers_of else None
        self.layers = nn.ModuleDict({str(i): Layer(i) for layers in self.layers_of.values() for i in layers})

    def forward(self, x: Tensor, micro_batch: Ids, chunk: int) -> Tensor:
        assert x.shape[0] == micro_batch.input_ids.shape[0]
        h = self.embed[x] if chunk == 0 else x
        for layer in self.layers_of[chunk]:
            h = self.layers[str(layer)](h)
        return h

    def names_of(self, chunk: int) -> set[str]:
        """Its parameters."""
        layers = {f"layers.{layer}." for layer in self.layers_of[chunk]}
        return {name for name, _ in self.named_parameters()
                if name.startswith(tuple(layers)) or (name == "embed" and chunk == 0)}


class Gradients:
    """All gradients of a stage by name; those of its linears' weights are taken from autograd."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.weight_grads = stage, WeightGrads()
        self.main = {}
        for weight in attach(stage, self.weight_grads):
            self.main[weight] = torch.zeros_like(weight)
            self.weight_grads.register(weight, lambda weight=weight: self.main[weight], lambda: None)

    def of(self, chunk: int) -> dict[str, Tensor]:
        """By name, those of a chunk's parameters as they are now."""
        named = dict(self.stage.named_parameters())
        return {name: self.main[named[name]] if named[name] in self.main else named[name].grad
                for name in self.stage.names_of(chunk)}


def loss(out: Tensor, micro_batch: Ids) -> tuple[Tensor, dict[str, Tensor]]:
    value = (out * (1 + micro_batch.input_ids[:, None])).square().sum()
    return value, {"loss": value}


def whole(tokens: tuple[int, ...]) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Gradients, outputs and losses of the whole model, without any schedule and by autograd alone."""
    model = Stage(Chunks(), 0)
    outputs = [model(batch.input_ids, batch, 0) for batch in micro_batches(tokens)]
    losses = [loss(out, batch)[0] for out, batch in zip(outputs, micro_batches(tokens), strict=True)]
    sum(losses).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradients, [out.detach() for out in outputs], [value.detach() for value in losses]
