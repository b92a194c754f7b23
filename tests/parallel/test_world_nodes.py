"""Which ranks share a node: every rank has the same answer, from launchers that tell each rank a part of it."""

import pytest

from hybridflow.parallel.nodes import ONE_NODE, Nodes
from hybridflow.parallel.place import Place
from hybridflow.parallel.world import World, _agreed_nodes
from tests.ranks import run_ranks


def agreed(world: World, told: list[tuple[int, int | None]]) -> Nodes:
    local_rank, ranks_per_node = told[world.rank]
    return _agreed_nodes(Place(world.rank, world.size, local_rank, ranks_per_node=ranks_per_node), world.device)


@pytest.mark.parametrize(("told", "nodes"), [
    ([(0, 2), (1, 2), (0, 2), (1, 2)], Nodes(2)),
    ([(0, 4), (1, 4), (2, 4), (3, 4)], Nodes(4)),
    ([(0, 3), (1, 3), (2, 3), (0, 1)], Nodes(3)),  # the last node has fewer
    ([(0, 1), (0, 3), (1, 3), (2, 3)], ONE_NODE),  # the first has fewer: no equal nodes of consecutive ranks
    ([(0, 2), (0, 2), (1, 2), (1, 2)], ONE_NODE),  # dealt to nodes in turn
    ([(0, None), (1, None), (0, None), (1, None)], ONE_NODE),
    ([(0, 2), (1, 2), (0, None), (1, None)], ONE_NODE),
], ids=str)
def test_all_ranks_agree(told, nodes):
    assert run_ranks(4, agreed, told) == [nodes] * 4
