"""One plot of a schedule in time: a lane for each stage, simulated and measured above each other on one scale.

Owns how a `Timeline` looks. It times nothing. Equal timelines give equal bytes.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hybridflow.parallel.schedules.actions import COMPUTE, Action, Kind
from hybridflow.parallel.schedules.timeline import Timeline

COLOURS = {Kind.F: "#2f6db3", Kind.B: "#d9641f", Kind.W: "#1a9a78", Kind.REDUCE: "#7b5ea7", Kind.STEP: "#2b2f33",
           Kind.RESHARD: "#d9a52b"}
MEANINGS = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight gradients", Kind.REDUCE: "reduce",
            Kind.STEP: "optimizer step", Kind.RESHARD: "reshard"}
BELOW = (Kind.REDUCE, Kind.RESHARD)  # flat marks under the cells: a reduce runs beside them
INK, GREY, IDLE = "#2b2f33", "#9aa0a6", "#eceef0"
DOTS_PER_INCH = 150
LEAST_WIDTH, MOST_WIDTH, LANE_HEIGHT = 9.0, 30.0, 0.42  # inches
MARGINS = 2.6  # inches beside the lanes: names of stages, their idle times
DIGIT_POINTS, NUMBER_SIZE = 4.6, 7.0  # width of a digit at the size of the numbers in cells
TALL, FLAT = 0.78, 0.14  # heights of a cell and of a reduce under it, in lanes
LEAST_MARK = 1.5  # points: reduces, steps and reshards are seen however short they are
LIGHTEST = 0.55  # how far a stage's last chunk is blended to white


class Clock(Enum):
    """What times are given in."""

    SECONDS = "seconds"
    FORWARDS = "forwards"  # one is a micro-batch's forward through a whole stage


@dataclass(frozen=True)
class Panel:
    """A timeline and its name, such as "simulated"."""

    name: str
    timeline: Timeline


@dataclass(frozen=True)
class _Scale:
    """From the times of a timeline to the axis, and from there to points."""

    factor: float
    unit: str
    points: float  # for one unit of the axis
    number: float  # points that the longest number of a micro-batch takes


def draw(path: Path, title: str, panels: Sequence[Panel], clock: Clock = Clock.SECONDS) -> None:
    """Draw timelines below each other, on one time scale that starts with the first computation of each.

    F, B and W are cells with the number of their micro-batch where it fits, lighter for a stage's later chunks; reduces
    are flat bars under them, since they run beside; what stays grey is idle. Beside each lane stands its idle part of
    the makespan, and the most micro-batches whose activations the stage holds at once (all of its chunks count as one).

    Raises:
        ValueError: `path` ends neither in .svg nor in .png.
    """
    require_picture(path)
    figure = _figure(title, panels, clock)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        FigureCanvasAgg(figure).print_png(str(path), metadata={"Software": None})
        return
    with matplotlib.rc_context({"svg.hashsalt": "hybridflow"}):  # else the ids in the file are random
        FigureCanvasSVG(figure).print_svg(str(path), metadata={"Date": None, "Creator": None})


def require_picture(path: Path) -> None:
    """Raises:
        ValueError: a file that is neither .svg nor .png.
    """
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"{path}: a schedule is drawn as .svg or .png, not as '{path.suffix}'")


def _figure(title: str, panels: Sequence[Panel], clock: Clock) -> Figure:
    longest = max(panel.timeline.duration for panel in panels)
    number = DIGIT_POINTS * _max_digits(panels) + 1
    width = _width(panels, longest, number)
    factor, unit = _unit(clock, longest)
    scale = _Scale(factor, unit, 72 * (width - MARGINS) / (factor * longest or 1.0), number)
    lanes = [panel.timeline.num_stages for panel in panels]
    height = 1.1 + sum(0.75 + LANE_HEIGHT * num for num in lanes)
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08, hspace=0.04)
    figure.suptitle(title, x=0.13 / width, ha="left", fontsize=12, fontweight="bold", color=INK)
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[num + 1.0 for num in lanes])[:, 0]
    for ax, panel in zip(all_axes, panels, strict=True):
        _draw_panel(ax, panel, scale)
        ax.set_xlim(0, (factor * longest or 1.0) + LEAST_MARK / scale.points)
    all_axes[-1].set_xlabel(scale.unit, color=INK, fontsize=9)
    figure.legend(handles=_legend(panels), loc="outside lower left", ncols=8, frameon=False, fontsize=8.5,
                  labelcolor=INK, handlelength=1.2, handleheight=1.0, columnspacing=1.4)
    return figure


def _width(panels: Sequence[Panel], longest: float, number: float) -> float:
    """Inches: wide enough for the numbers in the cells of a typical forward, within limits."""
    typical = statistics.median(span.duration for panel in panels for spans in panel.timeline.stages for span in spans
                                if span.action.kind is Kind.F)
    wanted = longest / typical * (number + 3) / 72 if typical else 0.0
    return min(max(LEAST_WIDTH, MARGINS + wanted), MOST_WIDTH)


def _max_digits(panels: Sequence[Panel]) -> int:
    return max(len(_number(span.action)) for panel in panels for stage in range(panel.timeline.num_stages)
               for span in panel.timeline.compute(stage))


def _unit(clock: Clock, longest: float) -> tuple[float, str]:
    if clock is Clock.FORWARDS:
        return 1.0, "time (1 = the forward of one micro-batch through a stage)"
    if longest >= 10:
        return 1.0, "seconds"
    return (1e3, "milliseconds") if longest >= 1e-3 else (1e6, "microseconds")


def _draw_panel(ax: Axes, panel: Panel, scale: _Scale) -> None:
    timeline = panel.timeline
    _dress(ax, timeline)
    short = {"seconds": "s", "milliseconds": "ms", "microseconds": "µs"}.get(scale.unit, "")
    words = f"{panel.name}: bubble {100 * timeline.bubble_fraction:.1f} %, " \
            f"{f'{scale.factor * timeline.makespan:.4g} {short}'.strip()} from first to last computation"
    ax.set_title(words, loc="left", fontsize=10, color=INK, pad=6)
    for stage in range(timeline.num_stages):
        ax.broken_barh([(0, scale.factor * timeline.makespan)], (stage - TALL / 2, TALL), facecolors=IDLE, lw=0)
        _draw_lane(ax, timeline, stage, scale)
        idle = timeline.idle[stage] / timeline.makespan if timeline.makespan else 0.0
        chunks = _chunks(timeline, stage)
        peak = timeline.peak_activations(1 / len(chunks))[stage] if chunks else 0.0
        ax.text(1.008, stage, f"idle {100 * idle:.0f} %, holds {peak:.3g}", fontsize=8, color=INK, va="center",
                transform=ax.get_yaxis_transform())


def _draw_lane(ax: Axes, timeline: Timeline, stage: int, scale: _Scale) -> None:
    """The cells of one stage: one collection for each colour, so that thousands of cells stay fast."""
    spans = [span for span in timeline.stages[stage] if span.action.kind in COLOURS]
    chunks = _chunks(timeline, stage)
    cells: dict[tuple[str, bool], list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        colour, flat = _colour(span.action, chunks), span.action.kind in BELOW
        left, width = scale.factor * (span.start - timeline.start), scale.factor * span.duration
        if span.action.kind not in COMPUTE:
            width = max(width, LEAST_MARK / scale.points)
        elif width * scale.points >= scale.number:  # all of a kind have their numbers, or none, were they alike
            ax.text(left + width / 2, stage, _number(span.action), fontsize=NUMBER_SIZE, zorder=4, ha="center",
                    va="center_baseline", color=INK if _is_light(colour) else "white")
        cells[colour, flat].append((left, width))
    for (colour, flat), bars in cells.items():
        narrowest = min(width for _, width in bars) * scale.points
        low, height = (stage + TALL / 2, FLAT) if flat else (stage - TALL / 2, TALL)
        ax.broken_barh(bars, (low, height), facecolors=colour, edgecolors="white", lw=min(0.6, 0.12 * narrowest),
                       zorder=3 if flat else 2)


def _chunks(timeline: Timeline, stage: int) -> list[int]:
    """The chunks of a stage, in the order of the model."""
    return sorted({span.action.chunk for span in timeline.compute(stage) if span.action.chunk is not None})


def _number(action: Action) -> str:
    return str(action.index)


def _colour(action: Action, chunks: Sequence[int]) -> str:
    """The colour of the kind, blended to white the later the chunk comes among the `chunks` of its stage."""
    base = COLOURS[action.kind]
    if action.chunk is None or len(chunks) == 1:
        return base
    part = LIGHTEST * chunks.index(action.chunk) / (len(chunks) - 1)
    return to_hex(tuple(value + part * (1 - value) for value in to_rgb(base)))


def _is_light(colour: str) -> bool:
    red, green, blue = to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue > 0.58


def _legend(panels: Sequence[Panel]) -> list[Patch | Line2D]:
    """An entry for each kind of action that is drawn; those below the cells look there as they do in the plot."""
    actions = [span.action for panel in panels for spans in panel.timeline.stages for span in spans]
    kinds = {action.kind for action in actions}
    names = dict(MEANINGS)
    if Kind.W not in kinds:
        names[Kind.B] = "backward, with weight gradients"
    patches: list[Patch | Line2D] = [_mark(kind, name) if kind in BELOW else Patch(facecolor=COLOURS[kind], label=name)
                                     for kind, name in names.items() if kind in kinds]
    patches.append(Patch(facecolor=IDLE, label="idle"))
    if any(len(_chunks(panel.timeline, stage)) > 1 for panel in panels for stage in range(panel.timeline.num_stages)):
        patches.append(Patch(facecolor="none", label="(lighter: later chunks)"))
    return patches


def _mark(kind: Kind, name: str) -> Line2D:
    return Line2D([], [], color=COLOURS[kind], marker="|", markersize=8, markeredgewidth=2, lw=0, label=name)


def _dress(ax: Axes, timeline: Timeline) -> None:
    ax.set_ylim(timeline.num_stages - 0.4, -0.55)
    ax.set_yticks(range(timeline.num_stages), [f"stage {stage}" for stage in range(timeline.num_stages)])
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(GREY)
    ax.tick_params(axis="x", colors=INK, labelsize=8, length=3)
    ax.tick_params(axis="y", colors=INK, labelsize=9, length=0)
