"""An optimizer step as a run's trace measured it, in the form in which schedules are simulated and drawn.

Owns the reading of trace.json. `trace_file` writes it, `parallel.schedules` simulates and draws.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.observe.phases import Phase
from hybridflow.observe.trace import TraceCategory
from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.schedules.actions import STEP, Action, Kind, Schedule
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.schedules.simulate import Costs
from hybridflow.parallel.schedules.timeline import Span, Timeline

Row = dict[str, Any]
AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True)
class MeasuredUpdate:
    """One optimizer step of the actor: what each stage did, in its order, and when, in seconds.

    Attributes:
        layout: the actor's, as the trace names its ranks.
        place: which optimizer step of the trace it is, from 0, of `num_updates`.
    """

    schedule: Schedule
    timeline: Timeline
    layout: Layout
    place: int
    num_updates: int


def read_update(path: Path, chunks: Chunks, tp: int = 1, cp: int = 1, dp: int | None = None) -> MeasuredUpdate:
    """The last of the fullest optimizer steps of the actor in a trace, as its first replica's stages ran it.

    A traced F or B begins when the stage turns to it, and may wait for its message first. What it needs is made by a
    span of another stage, so that part is told apart and taken off: here an action begins when its input has been
    made. (The message's own time stays in.) Likewise STEP begins when all stages have come to it. REDUCEs are left out
    where a stage's gradients are on one rank alone, so that nothing is reduced.

    Args:
        chunks: what lies on which stage in the traced run.
        tp, cp, dp: the other degrees that the run must have had; dp None: any.
    Raises:
        ValueError: the file is no such trace, or of a run with another layout.
    """
    rows = _rows(path)
    places = _places(rows, path)
    layout = _layout(places.values())
    _require_degrees(path, layout, {"tp": tp, "cp": cp, "dp": layout.dp if dp is None else dp, "pp": chunks.pp})
    lanes = _stage_lanes(rows, places)
    updates = [_updates(lane) for lane in lanes]
    if not updates[0] or len({len(each) for each in updates}) > 1:
        raise ValueError(f"{path} has no whole optimizer step of the actor in it")
    most = max(len(update) for update in updates[0])
    chosen = max(place for place, update in enumerate(updates[0]) if len(update) == most)
    left_out = Kind.REDUCE.value if layout.dp * layout.cp == 1 else None
    kept = [[row for row in each[chosen] if _kind(row) != left_out] for each in updates]
    schedule, timeline = _measured(path, kept, chunks)
    return MeasuredUpdate(schedule, timeline, layout, chosen, len(updates[0]))


def estimated_costs(measured: MeasuredUpdate) -> Costs:
    """The costs of a measured step: medians over its micro-batches, for each chunk by itself.

    Where backwards are not split, half of a backward is put down to weight gradients. Messages are taken to be free.
    """
    seconds: dict[tuple[Kind, int | None], list[float]] = defaultdict(list)
    for spans in measured.timeline.stages:
        for span in spans:
            seconds[span.action.kind, span.action.chunk].append(span.duration)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    numbers = range(measured.schedule.chunks.count)
    forward, backward, weight = (tuple(medians.get((kind, chunk), 0.0) for chunk in numbers)
                                 for kind in (Kind.F, Kind.B, Kind.W))
    if not measured.schedule.splits_backward:
        backward = weight = tuple(value / 2 for value in backward)
    reduce, step, reshard = (medians.get((kind, None), 0.0) for kind in (Kind.REDUCE, Kind.STEP, Kind.RESHARD))
    return Costs(forward, backward, weight, reduce=reduce, step=step, reshard=reshard)


def _rows(path: Path) -> list[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); a run writes it where logging.trace_step is "
                         "given") from None
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{path}: is no trace that a run wrote") from None
    return rows


def _places(rows: Sequence[Row], path: Path) -> dict[int, dict[str, int]]:
    """Where each rank stands on each axis, in the order of the ranks."""
    places = {}
    for row in sorted((row for row in rows if row["name"] == "process_name"), key=lambda row: row["pid"]):
        name = row["args"]["name"]
        place = {axis: int(index) for axis, index in re.findall(r"\b([a-z]+) (\d+)", name) if axis in AXES}
        if len(place) < len(AXES):
            raise ValueError(f"{path}: {name!r} does not say where the rank stands on {', '.join(AXES)}")
        places[row["pid"]] = place
    if not places:
        raise ValueError(f"{path}: is no trace that a run wrote")
    return places


def _layout(places: Collection[dict[str, int]]) -> Layout:
    """Of a trace that has all ranks of its run, which write_trace sees to."""
    highest = {axis: max(place[axis] for place in places) for axis in AXES}
    return Layout(**{axis: index + 1 for axis, index in highest.items()})


def _require_degrees(path: Path, traced: Layout, wanted: dict[str, int]) -> None:
    """`wanted`: the config's, by axis."""
    found = {"tp": traced.tp, "cp": traced.cp, "dp": traced.dp, "pp": traced.pp}
    if found != wanted:
        differ = [axis for axis in AXES if found[axis] != wanted[axis]]
        has, needs = (", ".join(f"{axis} {degrees[axis]}" for axis in differ) for degrees in (found, wanted))
        raise ValueError(f"{path} is of a run with {has}, and train.layout has {needs}: give the config of that run")


def _stage_lanes(rows: Sequence[Row], places: dict[int, dict[str, int]]) -> list[list[Row]]:
    """The spans of one rank of each stage: the first, which is of the first replica."""
    ranks: dict[int, int] = {}  # stage -> rank
    for rank, place in places.items():
        ranks.setdefault(place["pp"], rank)
    return [[row for row in rows if row["pid"] == rank and row["ph"] == "X"] for _, rank in sorted(ranks.items())]


def _updates(lane: Sequence[Row]) -> list[list[Row]]:
    """The pipeline spans of each optimizer step of the actor: each ends with STEP, and the RESHARDs behind it."""
    windows = [(row["ts"], row["ts"] + row["dur"]) for row in lane
               if row["cat"] == TraceCategory.PHASES.value and row["name"] == Phase.UPDATE_ACTOR.value]
    updates: list[list[Row]] = []
    ended = True
    for row in sorted((row for row in lane if row["cat"] == TraceCategory.PIPELINE.value), key=lambda row: row["ts"]):
        if not any(start <= row["ts"] <= end for start, end in windows):
            continue
        if ended and _kind(row) != Kind.RESHARD.value:
            updates.append([])
            ended = False
        if updates:
            updates[-1].append(row)
        ended = ended or row["name"] == Kind.STEP.value
    return [update for update in updates if any(row["name"] == Kind.STEP.value for row in update)]


def _kind(row: Row) -> str:
    """The value of the kind of a pipeline span, whose name is an action: "REDUCE" of "REDUCE3"."""
    return row["name"].partition(".")[0].rstrip("0123456789")


def _measured(path: Path, lanes: Sequence[Sequence[Row]], chunks: Chunks) -> tuple[Schedule, Timeline]:
    text = "\n".join(f"stage {stage}: " + " ".join(row["name"] for row in lane) for stage, lane in enumerate(lanes))
    try:
        schedule = Schedule.from_text(text, chunks)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for stage, actions in enumerate(schedule.stages):
        if {action.chunk for action in actions if action.kind is Kind.F} != set(chunks.of_stage(stage)):
            raise ValueError(f"{path}: stage {stage} did not run the chunks {chunks.of_stage(stage)} of this config; "
                             "give the config of that run")
    spans = [[Span(action, row["ts"] / 1e6, (row["ts"] + row["dur"]) / 1e6) for action, row in zip(actions, lane)]
             for actions, lane in zip(schedule.stages, lanes)]
    return schedule, _without_waits(spans)


def _without_waits(stages: Sequence[Sequence[Span]]) -> Timeline:
    ends = {span.action: span.end for spans in stages for span in spans if span.action.kind in (Kind.F, Kind.B)}
    together = max(span.start for spans in stages for span in spans if span.action.kind is Kind.STEP)

    def begun(span: Span) -> Span:
        needed = together if span.action == STEP else ends.get(_made_by(span.action), span.start)
        return span._replace(start=min(max(span.start, needed), span.end))

    return Timeline(tuple(tuple(map(begun, spans)) for spans in stages))


def _made_by(action: Action) -> Action:
    """The computation that makes the input of an F or B; of anything else, which needs nothing of others, itself."""
    if action.chunk is None or action.kind not in (Kind.F, Kind.B):
        return action
    return Action(action.kind, action.index, action.chunk + (-1 if action.kind is Kind.F else 1))
