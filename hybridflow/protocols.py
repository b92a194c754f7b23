"""The transfer protocols of HybridFlow (arXiv 2409.19256, table 3 and section 4.1) as one table.

A protocol says which part of a batch's rows each rank of a role is given, and whose answers are collected. Rows then
move by shard maps (`row_moves`): nobody gathers and scatters. Pure; it moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from hybridflow.parallel.mesh import Coord, Grid, Layout
from hybridflow.row_moves import RowsOfRank


class Protocol(Enum):
    """By the paper's names. A context rank is given the rows of its replica and keeps its part of their tokens."""

    ONE_TO_ALL = "one_to_all"
    THREE_D = "3d_proto"
    THREE_D_ALL_MICRO_DP = "3d_all_micro_dp"
    THREE_D_PP_ONLY = "3d_pp_only"
    DP = "dp_proto"
    ALL_TO_ALL = "all_to_all"
    PP_AS_DP = "pp_as_dp"


@dataclass(frozen=True)
class Transfer:
    """How rows come to the ranks of a layout and answers come back.

    Attributes:
        num_parts: into which the rows are cut; None where nobody cuts them, since each rank has rows of its own.
        part: which part a rank at this place is given.
        answers: whether answers are collected from there. Where several ranks have the same ones, each of them counts
            as a source, and the planner takes what is nearest.
    """

    num_parts: Callable[[Layout], int] | None
    part: Callable[[Coord, Layout], int]
    answers: Callable[[Coord, Layout], bool]


def _everywhere(at: Coord, layout: Layout) -> bool:
    return True


def _place(at: Coord, layout: Layout) -> int:
    """The number of a rank in the order of its grid."""
    return at.tp + layout.tp * (at.cp + layout.cp * (at.dp + layout.dp * at.pp))


TRANSFERS = {
    # The same rows to all, answers from all.
    Protocol.ONE_TO_ALL: Transfer(lambda layout: 1, lambda at, layout: 0, _everywhere),
    # A part to each replica, on all of its ranks; answers from its last stage.
    Protocol.THREE_D: Transfer(lambda layout: layout.dp, lambda at, layout: at.dp,
                               lambda at, layout: at.pp == layout.pp - 1),
    # Of a generation layout, whose dp counts the micro replicas of all training replicas; one rank speaks for each.
    Protocol.THREE_D_ALL_MICRO_DP: Transfer(lambda layout: layout.dp, lambda at, layout: at.dp,
                                            lambda at, layout: (at.tp, at.pp) == (0, 0)),
    # The same rows to all, answers from one rank of each stage.
    Protocol.THREE_D_PP_ONLY: Transfer(lambda layout: 1, lambda at, layout: 0,
                                       lambda at, layout: (at.tp, at.cp, at.dp) == (0, 0, 0)),
    # A part to each rank, as if it were a replica.
    Protocol.DP: Transfer(lambda layout: layout.size, _place, _everywhere),
    # Each rank has been given its rows already.
    Protocol.ALL_TO_ALL: Transfer(None, _place, _everywhere),
    # Stages are replicas as well: replica by replica, a part to each stage.
    Protocol.PP_AS_DP: Transfer(lambda layout: layout.dp * layout.pp, lambda at, layout: at.dp * layout.pp + at.pp,
                                lambda at, layout: (at.tp, at.cp) == (0, 0)),
}


def given(protocol: Protocol, grid: Grid, parts: Sequence[Sequence[int]], world_size: int) -> RowsOfRank:
    """The rows that each rank of the world is given; none outside of the grid.

    Args:
        parts: rows of each part; with `ALL_TO_ALL` of each rank of the grid, in its order.
    """
    transfer, layout = TRANSFERS[protocol], grid.layout
    wanted = layout.size if transfer.num_parts is None else transfer.num_parts(layout)
    assert len(parts) == wanted, (protocol, layout, len(parts))
    of_rank = {rank: tuple(parts[transfer.part(grid.coord(rank), layout)]) for rank in grid.ranks}
    return tuple(of_rank.get(rank, ()) for rank in range(world_size))


def answering(protocol: Protocol, grid: Grid, rows_of: RowsOfRank, speaks: Callable[[int], bool] | None = None
              ) -> RowsOfRank:
    """Of the rows that were given, those of the ranks whose answers are collected.

    Args:
        speaks: of a rank, where the protocol's own choice is not who has the answers (a pipeline in V order ends on its
            first stage).
    """
    transfer = TRANSFERS[protocol]
    chosen = speaks or (lambda rank: transfer.answers(grid.coord(rank), grid.layout))
    return tuple(rows if rank in grid.ranks and chosen(rank) else () for rank, rows in enumerate(rows_of))
