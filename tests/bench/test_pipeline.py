"""The rivals of `bench pipeline` compute the same gradient, and it refuses to report where they do not."""

import pytest
import torch
from torch import nn

from hybridflow.bench import pipeline
from hybridflow.bench.plain_stage import PlainStage, Shape, micro_batches
from hybridflow.bench.timing import summed_up
from hybridflow.parallel.world import World
from tests.ranks import run_ranks

TINY = Shape("tiny", hidden=8, layers=1, tokens=6, micro_batches=3)


def direct_gradients(stages: int) -> list[list[torch.Tensor]]:
    """Of each stage, without any pipeline."""
    model = [PlainStage(TINY, stage, stages) for stage in range(stages)]
    for batch in micro_batches(TINY):
        x = batch.input_ids
        for stage in model:
            x = stage(x)
        pipeline.summed_loss(x, batch.targets).backward()
    return [[param.grad for param in stage.parameters()] for stage in model]


def ours(world: World) -> list[torch.Tensor]:
    from hybridflow.parallel.mesh import Grid, Layout, Mesh

    mesh = Mesh(Grid.of(Layout(pp=world.size)), world)
    stage = PlainStage(TINY, mesh.pp.index, world.size)
    pipeline.our_step(stage, mesh, TINY, micro_batches(TINY))()
    return [param.grad for param in stage.parameters()]


def test_our_step_gives_the_gradient_of_the_plain_model():
    for direct, piped in zip(direct_gradients(2), run_ranks(2, ours)):
        torch.testing.assert_close(piped, direct, rtol=1e-5, atol=1e-6)


def test_all_rivals_agree_and_are_timed():
    answers = run_ranks(2, pipeline.compare, TINY, 2)
    for clocked, difference, notes in answers:
        pipeline.require_equal("tiny", difference)
        assert set(clocked) == {"hybridflow", "torch"} | ({"megatron"} if not notes else set())
        assert all(len(rounds) == 2 for rounds in clocked.values())
    times = summed_up([clocked for clocked, _, _ in answers])
    assert all(time.least_wall <= time.median_wall for time in times.values())


@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_a_wrong_gradient_is_refused(wrong: float):
    stage = nn.Linear(2, 2)
    right = lambda: stage(torch.ones(1, 2)).sum().backward()  # noqa: E731
    scaled = lambda: (wrong * stage(torch.ones(1, 2)).sum()).backward()  # noqa: E731
    pipeline.require_equal("same", pipeline.largest_difference(stage, {"one": right, "other": right}))
    with pytest.raises(pipeline.WrongGradient, match="tiny"):
        pipeline.require_equal("tiny", pipeline.largest_difference(stage, {"one": right, "other": scaled}))
