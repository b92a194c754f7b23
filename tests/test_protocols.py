"""The paper's transfer protocols by hand on eight ranks, and rows that go and come by each of them."""

import pytest
import torch

from hybridflow.parallel.mesh import Grid, Layout
from hybridflow.parallel.world import World
from hybridflow.protocols import TRANSFERS, Protocol, answering, given
from hybridflow.row_moves import move_rows
from tests.ranks import run_ranks

LAYOUT = Layout(tp=2, pp=2, dp=2)  # ranks: tp fastest, then dp, then pp
ALL = (0, 1, 2, 3)
# Of four rows: what ranks 0 to 7 are given, and on which of them answers are collected.
EXPECTED = {
    Protocol.ONE_TO_ALL: ([ALL], (ALL,) * 8, range(8)),
    Protocol.THREE_D: ([(0, 1), (2, 3)], ((0, 1), (0, 1), (2, 3), (2, 3)) * 2, (4, 5, 6, 7)),
    Protocol.THREE_D_ALL_MICRO_DP: ([(0, 1), (2, 3)], ((0, 1), (0, 1), (2, 3), (2, 3)) * 2, (0, 2)),
    Protocol.THREE_D_PP_ONLY: ([ALL], (ALL,) * 8, (0, 4)),
    Protocol.DP: ([(0,), (), (1,), (), (2,), (), (3,), ()], ((0,), (), (1,), (), (2,), (), (3,), ()), range(8)),
    Protocol.ALL_TO_ALL: ([(3,), (), (), (1, 0), (), (), (2,), ()], ((3,), (), (), (1, 0), (), (), (2,), ()), range(8)),
    Protocol.PP_AS_DP: ([(0,), (1,), (2,), (3,)], ((0,), (0,), (2,), (2,), (1,), (1,), (3,), (3,)), (0, 2, 4, 6)),
}


@pytest.mark.parametrize("protocol", Protocol)
def test_who_is_given_what_and_who_answers(protocol):
    parts, of_rank, answers = EXPECTED[protocol]
    grid = Grid.of(LAYOUT)
    assert given(protocol, grid, parts, 8) == of_rank
    assert answering(protocol, grid, of_rank) == tuple(rows if rank in answers else ()
                                                       for rank, rows in enumerate(of_rank))


def test_ranks_outside_of_the_grid_are_given_nothing():
    grid = Grid.of(Layout(dp=2), (3, 1))
    assert given(Protocol.THREE_D, grid, [(0,), (1, 2)], 4) == ((), (1, 2), (), (0,))
    assert answering(Protocol.THREE_D, grid, ((), (1, 2), (), (0,)), lambda rank: rank == 3) == ((), (), (), (0,))


def there_and_back(world: World, protocol: Protocol) -> None:
    """Ragged rows go from where they are at home to who is given them, and what is answered comes home."""
    layout, lengths = Layout(tp=2, dp=1, pp=2), (2, 0, 3, 1, 1)
    home = ((4, 0), (1,), (), (3, 2))
    transfer, rows = TRANSFERS[protocol], range(5)
    count = 4 if transfer.num_parts is None else transfer.num_parts(layout)
    parts = [tuple(row for row in rows if row % count == part) for part in range(count)]
    of_rank = given(protocol, Grid.of(layout), parts, 4)
    table = lambda rows: torch.tensor([[10.0 * row + i] for row in rows for i in range(lengths[row])]).reshape(-1, 1)  # noqa: E731
    mine = move_rows(world, lengths, home, of_rank, table(home[world.rank]))
    assert torch.equal(mine, table(of_rank[world.rank]))
    answers = answering(protocol, Grid.of(layout), of_rank)
    back = move_rows(world, lengths, answers, home, mine * 2 if answers[world.rank] else mine[:0])
    assert torch.equal(back, 2 * table(home[world.rank]))


@pytest.mark.parametrize("protocol", Protocol)
def test_rows_go_and_come_by_every_protocol(protocol):
    run_ranks(4, there_and_back, protocol)
