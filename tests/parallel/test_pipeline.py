"""The executor against one process: gradients, losses, outputs, order of callbacks, activations held."""

import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.pipeline import PipelineRunner
from hybridflow.parallel.schedule import forward_only, gpipe, one_f_one_b, peak_in_flight
from hybridflow.parallel.world import World
from tests.ranks import run_ranks

VOCAB, HIDDEN, LAYERS = 11, 3, 4
TOKENS = (7, 1, 5, 3, 2, 9)  # of each micro-batch: ragged
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ids:
    input_ids: torch.Tensor


def micro_batches() -> list[Ids]:
    generator = torch.Generator().manual_seed(5)
    return [Ids(torch.randint(VOCAB, (tokens,), generator=generator)) for tokens in TOKENS]


class Stage(nn.Module):
    """Some of the layers h + tanh(h W), after an embedding on the first stage. The whole model is the stage 0 of 1."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(6)
        embed = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
        layers = torch.randn(LAYERS, HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
        self.embed = nn.Parameter(embed) if stage == 0 else None
        mine = range(stage * LAYERS // num_stages, (stage + 1) * LAYERS // num_stages)
        self.layers = nn.ParameterDict({str(i): nn.Parameter(layers[i]) for i in mine})

    def forward(self, x: torch.Tensor, micro_batch: Ids) -> torch.Tensor:
        assert x.shape[0] == micro_batch.input_ids.shape[0]
        h = x if self.embed is None else self.embed[x]
        for weight in self.layers.values():
            h = h + torch.tanh(h @ weight)
        return h


def loss(out: torch.Tensor, micro_batch: Ids) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    value = (out * micro_batch.input_ids[:, None]).square().sum()
    return value, {"loss": value.detach()}


def whole() -> tuple[Stage, list[torch.Tensor], list[torch.Tensor]]:
    """The model after backward, and its outputs and losses, without any schedule."""
    model = Stage(0, 1)
    outputs = [model(mb.input_ids, mb) for mb in micro_batches()]
    losses = [loss(out, mb)[0] for out, mb in zip(outputs, micro_batches(), strict=True)]
    sum(losses).backward()
    return model, [out.detach() for out in outputs], [value.detach() for value in losses]


class Names:
    def __init__(self) -> None:
        self.names: list[str] = []

    def span(self, name: str):
        self.names.append(name)
        return nullcontext()


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def matches_whole(world: World, layout: Layout) -> None:
    mesh = Mesh(Grid.of(layout), world)
    model, outputs, losses = whole()
    for build in (gpipe, one_f_one_b):
        for count in (1, 2, len(TOKENS)):
            stage = Stage(mesh.pp.index, layout.pp)
            runner = PipelineRunner(stage, mesh, HIDDEN, torch.float64)
            schedule, names, calls = build(layout.pp, count), Names(), []
            results = runner.run(
                schedule, micro_batches()[:count], loss, trace=names, on_step=lambda calls=calls: calls.append("step"),
                on_reduce=lambda calls=calls, names=names: calls.append(("reduce", len(names.names))),
            )
            actions = [str(action) for action in schedule.stages[mesh.pp.index]]
            assert names.names == actions
            assert calls == [("reduce", len(actions) - 1), "step"]
            assert len(results) == (count if mesh.is_last_stage else 0)
            for metrics, want in zip(results, losses, strict=False):
                close(metrics["loss"], want)
        reference = dict(model.named_parameters())
        for name, param in stage.named_parameters():  # of the last run: all micro-batches
            close(param.grad, reference[name].grad)
    got = runner.run(forward_only(layout.pp, len(TOKENS)), micro_batches())
    assert len(got) == (len(TOKENS) if mesh.is_last_stage else 0)
    for out, want in zip(got, outputs, strict=False):
        assert not out.requires_grad
        close(out, want)
    got = runner.run(forward_only(layout.pp, 2), micro_batches()[:2], loss)
    for metrics, want in zip(got, losses, strict=False):
        close(metrics["loss"], want)


class Saved:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@contextmanager
def counted_graphs(alive: weakref.WeakSet):
    def pack(tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor)
        alive.add(saved)
        return saved
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        yield


def most_graphs_alive(world: World) -> list[tuple[int, int]]:
    """(most forward graphs alive at once, most outputs waiting in messages) for each builder."""
    mesh, peaks = Mesh(Grid.of(Layout(pp=world.size)), world), []
    for build in (gpipe, one_f_one_b):
        stage, alive, counts = Stage(mesh.pp.index, world.size), weakref.WeakSet(), []

        def forward(x, micro_batch, stage=stage, alive=alive, counts=counts):
            before = len(alive)
            with counted_graphs(alive):
                out = stage(x, micro_batch)
            counts.append(len(alive) / (len(alive) - before))
            return out

        # Equal graphs, so that the number of saved tensors counts graphs.
        PipelineRunner(forward, mesh, HIDDEN, torch.float64).run(build(world.size, 6), micro_batches(), loss)
        peaks.append(max(counts))
    return peaks


def sequence_parallel_shapes(world: World) -> None:
    """Messages are `[tokens/tp, hidden]`: each rank of tp sends its own part."""
    mesh = Mesh(Grid.of(Layout(tp=2, pp=2)), world)
    batches = [Ids(torch.arange(4)), Ids(torch.arange(8))]

    def stage(x, micro_batch):
        if not mesh.is_first_stage:
            return x * 2.0
        part = micro_batch.input_ids.chunk(2)[mesh.tp.index].double()
        return part[:, None].expand(-1, HIDDEN)  # not contiguous: the executor must cope

    got = PipelineRunner(stage, mesh, HIDDEN, torch.float64, sequence_parallel=True).run(forward_only(2, 2), batches)
    if mesh.is_last_stage:
        assert [out[:, 0].tolist() for out in got] == [
            [2.0 * i for i in batch.input_ids.chunk(2)[mesh.tp.index].tolist()] for batch in batches
        ]


def four_ranks(world: World) -> list[float]:
    for layout in (Layout(pp=4), Layout(pp=2, dp=2)):
        matches_whole(world, layout)
    sequence_parallel_shapes(world)
    return most_graphs_alive(world)


def test_one_stage() -> None:
    matches_whole(World.single(CPU), Layout())


def test_several_stages() -> None:
    peaks = run_ranks(4, four_ranks)
    assert tuple(peak for peak, _ in peaks) == peak_in_flight(gpipe(4, 6))
    assert tuple(peak for _, peak in peaks) == peak_in_flight(one_f_one_b(4, 6))


def test_what_does_not_belong_together() -> None:
    mesh = Mesh(Grid.of(Layout()), World.single(CPU))
    runner = PipelineRunner(Stage(0, 1), mesh, HIDDEN, torch.float64)
    with pytest.raises(ValueError, match="2 stages and 6 micro-batches was given 1 stages and 6 micro-batches"):
        runner.run(gpipe(2, 6), micro_batches(), loss)
    with pytest.raises(ValueError, match="1 stages and 5 micro-batches was given 1 stages and 6"):
        runner.run(gpipe(1, 5), micro_batches(), loss)
    with pytest.raises(ValueError, match="needs a loss: use forward_only"):
        runner.run(gpipe(1, 6), micro_batches())
