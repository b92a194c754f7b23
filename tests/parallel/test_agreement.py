"""Agreement of all ranks of a world and of some, of which the others know nothing."""

import pytest
import torch

from hybridflow.parallel.agreement import everyones, largest, told
from hybridflow.parallel.world import World
from tests.ranks import run_ranks

TEXT = "größer"  # its third and fourth byte are one letter, and so are the next two


def agreed(world: World, ranks: tuple[int, ...]) -> tuple[list[int], list[list[int]], str, str] | None:
    if world.rank not in ranks:
        return None
    numbers = torch.tensor([world.rank, -world.rank, -10 * (world.rank - 2) ** 2])
    text = TEXT if world.rank == ranks[-1] else "something else"
    return (largest(numbers, ranks, world).tolist(), everyones([world.rank, -5], ranks, world),
            told(text, ranks[-1], ranks, world), told(text, ranks[-1], ranks, world, num_bytes=3))


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 2, 3), (1, 2), (2,)], ids=str)
def test_all_members_know_the_same(ranks: tuple[int, ...]):
    known = [each for each in run_ranks(4, agreed, ranks) if each is not None]
    assert known == [([max(ranks), -min(ranks), 0], [[rank, -5] for rank in ranks], TEXT, "gr")] * len(ranks)


def test_a_world_of_one_knows_its_own():
    assert agreed(World.single(torch.device("cpu")), (0,)) == ([0, 0, -40], [[0, -5]], TEXT, "gr")
