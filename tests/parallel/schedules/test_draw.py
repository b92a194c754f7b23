"""The plot of a schedule: what is in it, and that the same timelines give the same bytes."""

import re

import pytest

from hybridflow.parallel.schedules.actions import Schedule
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.schedules.draw import COLOURS, Clock, Panel, draw
from hybridflow.parallel.schedules.simulate import Costs, simulate
from hybridflow.parallel.schedules.training import build

UNIT = Costs()


def timeline(m=3, costs=UNIT):
    kind = ScheduleKind.ONE_F_ONE_B
    return simulate(build(kind, kind.chunks(2, 1), m), costs)


def texts(svg):
    """matplotlib writes each text as a comment in front of its outlines."""
    return re.findall(r"<!-- (.*?) -->", svg)


def test_an_svg_names_stages_micro_batches_and_bubbles(tmp_path):
    path = tmp_path / "new" / "schedule.svg"
    simulated, measured = timeline(costs=Costs(0.01, 0.01, 0.01)), timeline(costs=Costs(0.02, 0.01, 0.01))
    draw(path, "1f1b on 2 stages", [Panel("simulated", simulated), Panel("measured", measured)])
    words = texts(path.read_text())
    assert "1f1b on 2 stages" in words and "milliseconds" in words
    assert "simulated: bubble 25.0 %, 120 ms from first to last computation" in words
    assert any(word.startswith("measured: bubble 25.0 %, 160 ms") for word in words)
    assert words.count("stage 0") == words.count("stage 1") == 2
    cells = [word for word in words if word in ("0", "1", "2")]
    assert cells.count("1") >= 8  # F and B on two stages, twice
    assert {"forward", "backward, with weight gradients", "optimizer step", "idle"} <= set(words)
    assert not any(word.startswith(("reduce", "reshard")) for word in words)  # nothing of them is drawn


@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_the_same_timelines_give_the_same_bytes(tmp_path, ending):
    for name in ("a", "b"):
        draw(tmp_path / f"{name}{ending}", "twice", [Panel("simulated", timeline())], Clock.FORWARDS)
    first, second = ((tmp_path / f"{name}{ending}").read_bytes() for name in ("a", "b"))
    assert first == second and len(first) > 1000


def test_later_chunks_are_lighter_and_split_backwards_have_a_colour_of_their_own(tmp_path):
    text = "stage 0: F0.0 F0.1 B0.1 W0.1 B0.0 W0.0 REDUCE0 STEP RESHARD0"
    path = tmp_path / "split.svg"
    costs = Costs(reduce=1.0, step=1.0, reshard=1.0)
    draw(path, "split", [Panel("simulated", simulate(Schedule.from_text(text, Chunks(1, 2)), costs))], Clock.FORWARDS)
    svg = path.read_text()
    assert all(f"fill: {colour}" in svg for colour in COLOURS.values())
    assert {"weight gradients", "reduce", "reshard", "(lighter: later chunks)"} <= set(texts(svg))
    fills = set(re.findall(r"fill: (#[0-9a-f]{6})", svg)) - set(COLOURS.values())
    assert len(fills) >= 3  # the lighter F, B and W


def test_cells_too_narrow_for_their_numbers_have_none(tmp_path):
    path = tmp_path / "wide.svg"
    draw(path, "many", [Panel("simulated", timeline(m=1000))], Clock.FORWARDS)
    assert not {"7", "77", "777"} & set(texts(path.read_text()))  # not some of them


def test_other_files_than_pictures_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a schedule is drawn as .svg or .png, not as '.pdf'"):
        draw(tmp_path / "schedule.pdf", "none", [Panel("simulated", timeline())])
