"""Writing a trace for chrome://tracing and Perfetto.

Owns the file format (Trace Event Format, "X" complete events and "M" metadata). It never records and never gathers.
"""

from __future__ import annotations

import json
from pathlib import Path

from hybridflow.observe.trace import TraceCategory, TraceEvent


def write_trace(events_by_rank: dict[int, list[TraceEvent]], path: Path, labels: dict[int, str] | None = None) -> None:
    """Write one lane per rank, with a sub-lane for each category the rank has events of.

    Times are microseconds since the first event of any rank. `labels` adds words to a rank's name, such as its
    coordinate ("tp 0, pp 1"); None adds none.
    """
    first_ns = min((event.start_ns for events in events_by_rank.values() for event in events), default=0)
    rows: list[dict[str, object]] = []
    for rank, events in sorted(events_by_rank.items()):
        label = f"rank {rank}" if labels is None else f"rank {rank} ({labels[rank]})"
        rows += _lane_names(rank, label, events)
        rows += [_complete_event(rank, event, first_ns) for event in sorted(events, key=_parents_first)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))


def _parents_first(event: TraceEvent) -> tuple[int, int]:
    return event.start_ns, -event.duration_ns


def _complete_event(rank: int, event: TraceEvent, first_ns: int) -> dict[str, object]:
    return {
        "name": event.name,
        "cat": event.category.value,
        "ph": "X",
        "pid": rank,
        "tid": _sub_lane(event.category),
        "ts": (event.start_ns - first_ns) / 1000,
        "dur": event.duration_ns / 1000,
    }


def _lane_names(rank: int, label: str, events: list[TraceEvent]) -> list[dict[str, object]]:
    used = {event.category for event in events}
    rows = [
        _metadata("process_name", rank, 0, name=label),
        _metadata("process_sort_index", rank, 0, sort_index=rank),
    ]
    for category in [category for category in TraceCategory if category in used]:
        lane = _sub_lane(category)
        rows.append(_metadata("thread_name", rank, lane, name=category.value))
        rows.append(_metadata("thread_sort_index", rank, lane, sort_index=lane))
    return rows


def _metadata(kind: str, rank: int, lane: int, **args: object) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": lane, "args": args}


def _sub_lane(category: TraceCategory) -> int:
    return list(TraceCategory).index(category) + 1
