"""The volumes of a move, and what a trial of it showed, as text for people and as JSON for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from hybridflow.observe.table import table
from hybridflow.parallel.mesh import Grid
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.reshard.move import REPEATS, Moved
from hybridflow.reshard.task import Side, Task
from hybridflow.reshard.volumes import Volumes

MANY_LINKS = 64
MANY_RANKS = 1 << 16  # from here on only programs read it, and lines take several times as long to write
UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def as_json(task: Task, volumes: Volumes, moved: Moved | None) -> str:
    """One JSON object. Bytes are whole numbers; per rank in `ranks`; null where something does not apply. In-flight
    and peak extra bytes are upper bounds, but those of `run`, which are counted.
    """
    content: dict[str, Any] = {
        "from": _side(task.train), "to": _side(task.generate), "world_size": task.world_size,
        "ranks_per_node": task.nodes.ranks_per_node, "dtype": str(task.dtype).removeprefix("torch."),
        "model_bytes": volumes.model_bytes,
        "received_bytes": volumes.received_bytes, "lower_bound_bytes": volumes.lower_bound_bytes,
        "received_models": volumes.received_bytes / volumes.model_bytes,
        "all_ranks_planned": volumes.all_planned,
        "peak_extra_bytes": {"shared": volumes.peak_extra_bytes, "packed": volumes.peak_extra_bytes_packed},
        "peak_parameter_bytes": {"shared": max(rank.shared_bytes for rank in volumes.ranks),
                                 "packed": max(rank.packed_bytes for rank in volumes.ranks)},
        "formulas": {formula.name: {"received_bytes": formula.received_bytes,
                                    "peak_parameter_bytes": formula.parameter_bytes} for formula in volumes.formulas},
        "links": [{"from": source, "to": dest, "bytes": size} for (source, dest), size in volumes.links.items()],
        "node_links": [{"from": source, "to": dest, "bytes": size}
                       for (source, dest), size in volumes.node_links.items()],
        "ranks": [{**vars(rank), "shared_bytes": rank.shared_bytes, "packed_bytes": rank.packed_bytes,
                   "planned": rank.planned, "node": task.nodes.of(rank.rank),
                   "train": _coord(task.train_grid, rank.rank, task.src),
                   "generate": _coord(task.generate_grid, rank.rank, task.dst)}
                  for rank in volumes.ranks],
    }
    if moved is not None:
        content["run"] = {**asdict(moved), "bytes_per_second": moved.bytes_per_second}
    return json.dumps(content, indent=1 if len(volumes.ranks) <= MANY_RANKS else None)


def as_text(task: Task, volumes: Volumes, moved: Moved | None) -> str:
    """Paragraphs and tables."""
    parts = [_head(task, volumes), _ranks(task, volumes), _links(task, volumes), _formulas(task, volumes)]
    return "\n\n".join([*parts, *([_moved(moved)] if moved is not None else [])])


def _head(task: Task, volumes: Volumes) -> str:
    total, bound = volumes.received_bytes, volumes.lower_bound_bytes
    near = {True: ", tensor groups of generation in nodes", False: ", tensor groups of generation across nodes"}
    nodes = task.nodes.ranks_per_node
    place = "" if nodes is None else f", {nodes} ranks per node{near[task.keeps_groups_in_nodes]}"
    return "\n".join([
        f"{task.train} -> {task.generate}: {task.world_size} ranks{place}",
        f"model {size(volumes.model_bytes)} in {str(task.dtype).removeprefix('torch.')}",
        f"received by all ranks {size(total)} = {total / volumes.model_bytes:.3g} models, lower bound {size(bound)}",
        f"peak extra memory of a rank at most {size(volumes.peak_extra_bytes)} (training weights used in place), "
        f"{size(volumes.peak_extra_bytes_packed)} (a copy); "
        f"of it in flight {size(max(rank.in_flight_bytes for rank in volumes.ranks))}"])


def _ranks(task: Task, volumes: Volumes) -> str:
    chosen = volumes.ranks if volumes.all_planned else [rank for rank in volumes.ranks if rank.planned]
    rows = [[str(one.rank), str(task.nodes.of(one.rank)), _place(task.train_grid, one.rank, task.src),
             _place(task.generate_grid, one.rank, task.dst), size(one.received_bytes), size(one.lower_bound_bytes),
             size(one.sent_bytes or 0), size(one.shared_bytes)] for one in chosen]
    text = table(("rank", "node", "trains as", "generates as", "receives", "lower bound", "sends", "parameters"), rows)
    if volumes.all_planned:
        return text
    return f"{text}\n{len(chosen)} of {len(volumes.ranks)} ranks planned; totals count the others by their kinds"


def _links(task: Task, volumes: Volumes) -> str:
    if not volumes.links:
        return "no bytes over any link"
    whose = "" if volumes.all_planned else " into the planned ranks"
    links = list(volumes.links.items())[:MANY_LINKS]
    left = len(volumes.links) - len(links)
    more = f"\nand {left} more (--json has all)" if left else ""
    text = f"links{whose}\n{table(('ranks', 'bytes'), [[f'{a} -> {b}', size(count)] for (a, b), count in links])}{more}"
    if task.nodes.ranks_per_node is None:
        return text
    rows = [[f"{a} -> {b}" if a != b else f"in {a}", size(count)] for (a, b), count in volumes.node_links.items()]
    return f"{text}\n\nbetween nodes{whose}\n{table(('nodes', 'bytes'), rows[:MANY_LINKS])}"


def _formulas(task: Task, volumes: Volumes) -> str:
    def shown(value: float | None) -> str:
        return "-" if value is None else size(value)

    ranks = volumes.ranks
    rows = [[formula.name, shown(formula.received_bytes), shown(formula.received_bytes),
             shown(formula.parameter_bytes)] for formula in volumes.formulas]
    rows.append(["ours", size(volumes.received_bytes / len(task.dst.ranks)),
                 size(max(rank.received_bytes for rank in ranks)), size(max(rank.shared_bytes for rank in ranks))])
    return (f"{table(('of one rank', 'receives, mean', 'most', 'parameters, most'), rows)}\n"
            "ours: of the ranks that generate; others: by the formulas of HybridFlow's Table 2 (arXiv 2409.19256)\n"
            "- where they do not apply")


def _moved(moved: Moved) -> str:
    if moved.wrong:
        return "\n".join(["moved, and wrong:", *moved.wrong])
    received = sum(moved.received_bytes)
    return (f"moved {size(received)} in {moved.seconds:.4f} s (the fastest of {REPEATS}): "
            f"{moved.bytes_per_second / 1e9:.3f} GB/s over all links; every element and checksum is right\n"
            f"most extra memory of a rank {size(max(moved.extra_bytes))}, "
            f"of it in staging buffers {size(max(moved.buffer_bytes))}")


def _side(side: Side) -> dict[str, Any]:
    return {**asdict(side.layout), "vpp": side.vpp, "chunk_order": side.order.value, "ranks": list(side.ranks)}


def _coord(grid: Grid, rank: int, of: ShardMap) -> dict[str, int] | None:
    return vars(grid.coord(rank)) if rank in of else None


def _place(grid: Grid, rank: int, of: ShardMap) -> str:
    """Example: "tp1 pp0 dp3"; "-" for a rank outside the grid."""
    if rank not in of:
        return "-"
    coord = grid.coord(rank)
    return f"tp{coord.tp} pp{coord.pp} dp{coord.dp}" + (f" cp{coord.cp}" if grid.layout.cp > 1 else "")


def size(num_bytes: float) -> str:
    """Example: `size(1_500_000) == "1.50 MB"`."""
    for unit, scale in UNITS:
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes:.0f} B"
