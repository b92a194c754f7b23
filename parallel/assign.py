"""Which rank takes which coordinate of another layout, so that the fewest bytes must move.

Owns the choice (HybridFlow, arXiv 2409.19256, section 5.3, gives one for special cases). Pure metadata, the same on
every rank; it never plans a copy and knows no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from hybridflow.parallel.assign_block import solve_block
from hybridflow.parallel.assign_task import Task
from hybridflow.parallel.mesh import Grid, Layout
from hybridflow.parallel.nodes import ONE_NODE, Nodes
from hybridflow.parallel.shard_map import ShardMap


def assign(src: ShardMap, train: Grid, layout: Layout, dst_map: Callable[[Grid], ShardMap], *,
           nodes: Nodes = ONE_NODE, tp_within_node: bool = False) -> Grid:
    """The grid of `layout` on the ranks of `train` that has the fewest bytes to move, whatever the order of its ranks.

    What all ranks receive is what all coordinates want less what the ranks that take them have of it, so that a
    perfect matching of ranks to coordinates with the largest overlap is best, exactly. Overlaps depend on kinds of
    ranks only and are counted once for each pair of kinds; matchings are found in blocks that are small beside the
    world (`Task.blocks` says why that loses nothing), and once for all blocks that look alike.

    Of the assignments with the fewest bytes it is one that brings the fewest into nodes, each counted once for a node
    (`solve_block` says up to which size that is exact), and of these one near the order of `train.ranks`. With
    `tp_within_node` it is the best of those that keep tensor groups in nodes.

    What is best for the training weights is best for their shares at the optimizer too, where generation and training
    weights are filled from them in one pass: a share lies in its rank's training weights, so that what a rank receives
    is its training and generation weights together less the share.

    Args:
        src: what each rank has.
        train: whose ranks take part; where nothing else decides, ranks are taken in its order.
        dst_map: what each rank of a grid of `layout` must have. It is asked about one grid only: in another order of
            the ranks, each coordinate must want the same.
        nodes: which ranks are near each other.
        tp_within_node: whether every tensor group of `layout` must lie in one node. Without it groups may be spread
            over nodes even where they would fit, if that brings fewer bytes into nodes.
    Raises:
        ValueError: layout and train have unequally many ranks, a tensor group fits no node, canonical shapes differ, or
            nobody has what is wanted.
    Example: train tp4, generate tp2 dp2: tensor groups (0, 2) and (1, 3), and each rank receives a quarter of the model
        (in plain order, half of the ranks receive half of it).
    """
    if layout.size != len(train.ranks):
        raise ValueError(f"layout {layout} is for {layout.size} ranks, but {len(train.ranks)} take part: "
                         "the product of its degrees must be that number")
    if tp_within_node:
        _require_fitting_nodes(train.ranks, layout.tp, nodes)
    task = Task.of(src, dst_map(Grid(layout, train.ranks)), train.ranks, layout.tp, nodes)
    group_size = layout.tp if tp_within_node else 1
    order: list[int] = [-1] * layout.size
    solved: dict[Hashable, list[int]] = {}
    for block in task.blocks(tp_within_node):
        if block.pattern not in solved:
            solved[block.pattern] = solve_block(task, block, group_size)
        for place, member in zip(block.places, solved[block.pattern]):
            order[place] = train.ranks[block.members[member]]
    return Grid(layout, tuple(order))


def _require_fitting_nodes(ranks: Sequence[int], tp: int, nodes: Nodes) -> None:
    for node, size in sorted(Counter(nodes.of(rank) for rank in ranks).items()):
        if size % tp:
            fitting = [degree for degree in range(1, size + 1) if size % degree == 0]
            nearest = min(fitting, key=lambda degree: (abs(degree - tp), degree))
            raise ValueError(f"tp {tp} does not fit into nodes: {size} of node {node}'s ranks take part "
                             f"({nodes.ranks_per_node or 'all'} ranks per node) and {tp} does not divide {size}: "
                             f"use tp {nearest}, or let tensor groups span nodes")
