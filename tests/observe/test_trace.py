"""Recording, gathering over ranks and writing traces."""

import json
import time
from types import SimpleNamespace

import pytest
import torch

from hybridflow.observe.trace import Trace, TraceCategory, TraceEvent, settle_device
from hybridflow.observe.trace_file import write_trace
from hybridflow.observe.trace_gather import RankEvents, clock_offset_ns, decode, encode, gather_events, shifted
from hybridflow.parallel.world import World
from tests.ranks import run_ranks

PHASES, PIPELINE, RESHARD = TraceCategory


def test_records_only_between_start_and_stop():
    trace = Trace()
    with trace.span("early", PHASES):
        pass
    trace.start()
    with trace.span("in", PHASES):
        pass
    trace.stop()
    with trace.span("late", PHASES):
        pass
    assert [event.name for event in trace.events] == ["in"]
    trace.start()
    assert trace.events == []


def test_spans_nest_and_measure():
    trace = Trace()
    trace.start()
    with trace.span("outer", PHASES):
        with trace.lane(PIPELINE).span("F 0"):
            time.sleep(0.01)
    inner, outer = trace.events
    assert (inner.name, inner.category, outer.name) == ("F 0", PIPELINE, "outer")
    assert outer.start_ns <= inner.start_ns
    assert inner.start_ns + inner.duration_ns <= outer.start_ns + outer.duration_ns
    assert inner.duration_ns >= 10_000_000


def test_a_raising_block_is_recorded():
    trace = Trace()
    trace.start()
    with pytest.raises(KeyError), trace.span("bad", PHASES):
        raise KeyError
    assert [event.name for event in trace.events] == ["bad"]


def test_off_makes_no_object():
    trace = Trace()
    assert trace.span("a", PHASES) is trace.span("b", PIPELINE)


def test_settles_at_both_edges():
    calls = []
    trace = Trace(settle=lambda: calls.append(1))
    with trace.span("off", PHASES):
        pass
    assert calls == []
    trace.start()
    with trace.span("on", PHASES):
        pass
    assert len(calls) == 2


def test_the_cpu_needs_no_settling():
    assert settle_device(World.single().device) is None or World.single().device.type != "cpu"


def test_an_accelerator_settles_its_computation_and_not_its_messages(monkeypatch):
    """A posted receive ends when another rank sends, which may wait for this one."""
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("computation"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: waited.append("all of the device"))
    settle_device(torch.device("cuda", 0))()
    assert waited == ["computation"]


def test_file_has_a_lane_for_each_rank(tmp_path):
    events = {
        0: [TraceEvent("F 0", PIPELINE, 6_000, 1_500), TraceEvent("update_actor", PHASES, 5_000, 4_000)],
        3: [TraceEvent("send", RESHARD, 7_000, 250)],
    }
    path = tmp_path / "deep" / "trace.json"
    write_trace(events, path, labels={0: "tp 0, pp 0", 3: "tp 1, pp 1"})
    rows = json.loads(path.read_text())["traceEvents"]
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert names == {0: "rank 0 (tp 0, pp 0)", 3: "rank 3 (tp 1, pp 1)"}
    lanes = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert lanes == {(0, 1): "phases", (0, 2): "pipeline", (3, 3): "reshard"}
    spans = [row for row in rows if row["ph"] == "X"]
    assert [(s["name"], s["pid"], s["tid"], s["ts"], s["dur"]) for s in spans] == [
        ("update_actor", 0, 1, 0.0, 4.0),
        ("F 0", 0, 2, 1.0, 1.5),
        ("send", 3, 3, 2.0, 0.25),
    ]


def test_parents_come_before_children_of_the_same_start(tmp_path):
    events = [TraceEvent("child", PHASES, 0, 10), TraceEvent("parent", PHASES, 0, 20)]
    write_trace({0: events}, tmp_path / "t.json")
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [row["name"] for row in rows if row["ph"] == "X"] == ["parent", "child"]


def test_an_empty_trace_is_a_valid_file(tmp_path):
    write_trace({0: [], 1: []}, tmp_path / "t.json")
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {row["pid"] for row in rows} == {0, 1} and all(row["ph"] == "M" for row in rows)


def test_encoding_round_trips():
    sent = RankEvents((5, 10**18), [TraceEvent('F "0" é', PIPELINE, 10**18 + 1, 7), TraceEvent("x", RESHARD, 1, 0)])
    assert decode(encode(sent)) == sent


def test_one_late_barrier_does_not_move_the_clock():
    mine, theirs = (100, 200, 300, 400, 500), (40, 140, 240, 999, 440)
    assert clock_offset_ns(mine, theirs) == 60
    assert shifted([TraceEvent("a", PHASES, 40, 5)], 60) == [TraceEvent("a", PHASES, 100, 5)]


def _record_and_gather(world: World) -> tuple[TraceEvent, dict[int, list[TraceEvent]] | None]:
    trace = Trace()
    trace.start()
    with trace.span(f"work of {world.rank}", PHASES):
        for k in range(world.rank):
            with trace.span(f"F {k}", PIPELINE):
                pass
    trace.stop()
    return trace.events[-1], gather_events(world, trace)


def test_rank_0_gets_every_rank_on_its_clock():
    results = run_ranks(4, _record_and_gather)
    by_rank = results[0][1]
    assert [gathered for _, gathered in results[1:]] == [None, None, None]
    assert list(by_rank) == [0, 1, 2, 3]
    for rank, (event, _) in enumerate(results):
        assert [e.name for e in by_rank[rank]] == [*(f"F {k}" for k in range(rank)), f"work of {rank}"]
        got = by_rank[rank][-1]
        assert got.duration_ns == event.duration_ns
        # One host: the clocks are the same one, so the true offset is 0; what is left is how well barriers align.
        assert abs(got.start_ns - event.start_ns) < 200_000_000


def test_a_world_of_one_gathers_its_own():
    trace = Trace()
    trace.start()
    with trace.span("a", PHASES):
        pass
    assert gather_events(World.single(), trace) == {0: trace.events}
