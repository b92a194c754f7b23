"""A mesh whose ranks are in any order computes what one process does: groups go by coordinate, not by rank."""

import pytest
import torch

from hybridflow.generation.engine import Generator
from hybridflow.generation.records import Completion, SamplingParams
from hybridflow.generation.runners import make_runner
from hybridflow.models.config import Head
from hybridflow.models.decoder import DecoderStage
from hybridflow.models.layout import chunk_layers
from hybridflow.parallel.collectives import all_gather, all_reduce, reduce_scatter
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.world import World
from tests.generation.small_model import CONFIGS, assert_same, make_generator, make_prompts, set_weights
from tests.ranks import run_ranks

PARAMS = SamplingParams(max_new_tokens=6, temperature=0.9, stop_ids=(2, 9))
PROMPTS = make_prompts([1, 9, 2, 17], samples=2)
GRIDS = [Grid(Layout(tp=4), (0, 2, 1, 3)), Grid(Layout(tp=4), (3, 0, 2, 1)), Grid(Layout(tp=2, dp=2), (0, 3, 2, 1)),
         Grid(Layout(tp=2, dp=2), (3, 1, 0, 2))]


def collectives(world: World, grid: Grid) -> None:
    """Each member's number is its coordinate: the results say in which order they were put together."""
    tp = Mesh(grid, world).tp
    assert tp.index == grid.coord(world.rank).tp and tp.ranks[tp.index] == world.rank
    mine = torch.full((3,), float(tp.index))
    assert all_gather(mine, tp).tolist() == [float(i) for i in range(tp.size) for _ in range(3)]
    rows = torch.arange(tp.size, dtype=torch.float64) * (1 + tp.index)
    total = sum(1 + i for i in range(tp.size))
    assert reduce_scatter(rows, tp).tolist() == [tp.index * total]
    assert all_reduce(mine, tp).tolist() == [float(sum(range(tp.size)))] * 3


def generate(world: World, grid: Grid, family: str) -> tuple[int, list[Completion]]:
    """This rank's replica, and its share of the completions."""
    config, mesh, chunks = CONFIGS[family], Mesh(grid, world), Chunks()
    stage = DecoderStage(config, mesh, Head.LANGUAGE_MODEL, chunks=chunks,
                         chunk_layers=chunk_layers(config.num_layers, chunks), sequence_parallel=False,
                         dtype=torch.float64)
    set_weights(stage, grid, world.rank, config, 0)
    generator = Generator(stage, mesh, config, make_runner(stage, mesh, owns_weights=True))
    generator.wake()
    replica = mesh.coord.dp
    return replica, generator.generate(PROMPTS[replica::grid.layout.dp], PARAMS, seed=3)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.layout} {grid.ranks}")
def test_collectives_go_by_coordinate(grid: Grid):
    run_ranks(4, collectives, grid)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.layout} {grid.ranks}")
def test_tokens_do_not_depend_on_the_order(grid: Grid, family: str):
    want = make_generator(config=CONFIGS[family]).generate(PROMPTS, PARAMS, seed=3)
    results = run_ranks(4, generate, grid, family)
    for rank, (replica, completions) in enumerate(results):
        assert replica == grid.coord(rank).dp
        assert_same(completions, want[replica::grid.layout.dp])
