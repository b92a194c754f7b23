"""The learning curve of a run as one PNG.

Owns how metrics.jsonl is drawn. It reads records and draws them; it computes no metric.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hybridflow.observe.metric_log import MetricRecord, read_metrics
from hybridflow.observe.phases import Phase

# Runs of at least this many steps get a smoothed line over the raw one.
SMOOTH_FROM_STEPS = 40
DOTS_PER_INCH = 130

BLUE, ORANGE, GREY = "#2f6db3", "#d9772b", "#9aa0a6"
INK, FAINT = "#2b2f33", "#d8dce0"
# One colour for each phase, near hues for near work: blues make rollouts, greens and yellows score, reds train.
PHASE_COLOURS = {
    Phase.RESHARD: "#7b5ea7",
    Phase.GENERATE: "#2f6db3",
    Phase.REWARD: "#6db5d1",
    Phase.REFERENCE: "#3a8f5c",
    Phase.VALUES: "#9cc35a",
    Phase.LOG_PROBS: "#e3c04b",
    Phase.UPDATE_CRITIC: "#e8a06b",
    Phase.UPDATE_ACTOR: "#c8503c",
}


@dataclass(frozen=True)
class Line:
    """A metric and how it is drawn. Example: `Line("reward/mean", "mean reward", BLUE)`."""

    metric: str
    label: str
    colour: str
    dots: bool = False  # measured in some steps only: dots, joined, and never smoothed


@dataclass(frozen=True)
class Panel:
    """A set of lines over the steps. `right` is drawn against an axis of its own on the right."""

    title: str
    left: tuple[Line, ...]
    right: tuple[Line, ...] = ()
    left_label: str = ""
    right_label: str = ""


PANELS = (
    Panel("Reward, held-out accuracy", (Line("reward/mean", "mean reward", BLUE),
                                        Line("eval/accuracy", "held-out accuracy", ORANGE, dots=True))),
    Panel("KL (nats per token)", (Line("policy/kl_reference", "to the reference", BLUE),
                                  Line("policy/approx_kl", "of the update", ORANGE))),
    Panel("Entropy (nats per token)", (Line("policy/entropy", "policy", BLUE),)),
    Panel("Supervised loss (nats per token)", (Line("sft/loss", "supervised", BLUE),)),
    Panel("Preference loss", (Line("preference/loss", "training", BLUE),
                              Line("eval/preference_loss", "held out", ORANGE, dots=True))),
    Panel("Preference accuracy", (Line("preference/accuracy", "training", BLUE),
                                  Line("eval/preference_accuracy", "held out", ORANGE, dots=True))),
    Panel("Rewards of answers", (Line("preference/chosen_reward", "chosen", BLUE),
                                 Line("preference/rejected_reward", "rejected", ORANGE))),
    Panel("Loss", (Line("policy/loss", "policy", BLUE),), (Line("critic/loss", "critic", ORANGE),), "policy", "critic"),
    Panel("Gradient norm", (Line("sft/grad_norm", "supervised", BLUE),)),
    Panel("Gradient norm", (Line("preference/grad_norm", "preference", BLUE),)),
    Panel("Gradient norm", (Line("policy/grad_norm", "policy", BLUE),), (Line("critic/grad_norm", "critic", ORANGE),),
          "policy", "critic"),
)


def draw_curve(metrics_path: Path, png_path: Path, title: str) -> bool:
    """Draw the learning curve of a metrics.jsonl; False, and no file, where it has nothing to draw yet."""
    figure = learning_curve(read_metrics(metrics_path), title)
    if figure is None:
        return False
    png_path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(png_path))
    return True


def learning_curve(records: Sequence[MetricRecord], title: str) -> Figure | None:
    """A panel over the steps for each thing that the run logged, step times last; None where it logged none."""
    logged = {name for record in records for name, value in record.items() if value is not None}
    draws = [partial(_draw_panel, panel=panel) for panel in PANELS
             if any(line.metric in logged for line in (*panel.left, *panel.right))]
    if "time/step" in logged:
        draws.append(_draw_step_time)
    if not draws:
        return None
    num_rows = 1 if len(draws) <= 3 else 2
    num_columns = math.ceil(len(draws) / num_rows)
    figure = Figure(figsize=(5 * num_columns, 4 * num_rows), dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.02, hspace=0.03)
    figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold", color=INK)
    for place, draw in enumerate(draws, start=1):
        ax = figure.add_subplot(num_rows, num_columns, place)
        draw(ax, records=records)
        ax.set_xlabel("step", color=INK)
    return figure


def series(records: Sequence[MetricRecord], metric: str) -> tuple[list[float], list[float]]:
    """(steps, values) where the metric was logged; NaN, which leaves a gap, where its value was not finite."""
    logged = [record for record in records if metric in record]
    values = [record[metric] for record in logged]
    return [record["step"] for record in logged], [math.nan if value is None else value for value in values]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean over the `window` values around each one, fewer at the ends; NaN values are left out of their windows."""
    half = window // 2
    means = []
    for i in range(len(values)):
        near = [v for v in values[max(0, i - half) : i + half + 1] if not math.isnan(v)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means


def _draw_panel(ax: Axes, panel: Panel, records: Sequence[MetricRecord]) -> None:
    _dress(ax, panel.title)
    drawn = _draw_lines(ax, panel.left, records)
    if any(line.metric in record for line in panel.right for record in records):
        twin = ax.twinx()
        _dress_twin(ax, twin, panel)
        drawn += _draw_lines(twin, panel.right, records)
    if len(drawn) > 1 and not panel.right:
        ax.legend(handles=drawn, frameon=False, fontsize=9, labelcolor=INK)


def _draw_lines(ax: Axes, lines: Sequence[Line], records: Sequence[MetricRecord]) -> list[object]:
    drawn = []
    for line in lines:
        steps, values = series(records, line.metric)
        if not steps:
            continue
        if line.dots:
            drawn += ax.plot(steps, values, color=line.colour, label=line.label, lw=1.4, marker="o", ms=4.5, zorder=3)
        elif len(steps) >= SMOOTH_FROM_STEPS:
            ax.plot(steps, values, color=line.colour, lw=0.8, alpha=0.3)
            mean = smoothed(values, max(5, len(values) // 20))
            drawn += ax.plot(steps, mean, color=line.colour, label=line.label, lw=2)
        else:
            drawn += ax.plot(steps, values, color=line.colour, label=line.label, lw=1.8, marker="o", ms=2.5)
    return drawn


def _draw_step_time(ax: Axes, records: Sequence[MetricRecord]) -> None:
    timed = [record for record in records if "time/step" in record and record["time/step"] is not None]
    phases = [phase for phase in PHASE_COLOURS if any(_seconds(record, phase) > 0 for record in timed)]
    _dress(ax, "Step time (s), evaluation left out")
    stacks = [[_seconds(record, phase) for record in timed] for phase in phases]
    stacks.append([max(0.0, record["time/step"] - sum(_seconds(record, p) for p in phases)) for record in timed])
    # Two points a step, at its edges: a block a step at a hundredth of the cost of bars.
    edges = [edge for record in timed for edge in (record["step"] - 0.5, record["step"] + 0.5)]
    blocks = [[value for value in stack for _ in range(2)] for stack in stacks]
    labels = [phase.value.replace("_", " ") for phase in phases] + ["other"]
    ax.stackplot(edges, blocks, labels=labels, colors=[*(PHASE_COLOURS[phase] for phase in phases), FAINT], lw=0)
    _limit_step_time(ax, timed)
    handles, names = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], names[::-1], fontsize=8, labelcolor=INK, frameon=False, loc="center left",
              bbox_to_anchor=(1.0, 0.5))


def _limit_step_time(ax: Axes, timed: Sequence[MetricRecord]) -> None:
    """Show all steps, unless one took so long that it would flatten the rest: then it is named in the panel's title."""
    slowest = max(timed, key=lambda record: record["time/step"])
    typical = statistics.median(record["time/step"] for record in timed)
    if slowest["time/step"] < 3 * typical:
        ax.set_ylim(0, 1.08 * slowest["time/step"])
        return
    ax.set_ylim(0, 1.8 * typical)
    ax.set_title(f"Step time (s), evaluation left out; step {slowest['step']} took {slowest['time/step']:.1f}",
                 loc="left", fontsize=11, color=INK, pad=8)


def _seconds(record: MetricRecord, phase: Phase) -> float:
    name = f"time/{phase.value}"
    return record[name] if name in record and record[name] is not None else 0.0


def _dress(ax: Axes, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=11, color=INK, pad=8)
    ax.grid(axis="y", color=FAINT, lw=0.7)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(GREY)
    ax.tick_params(colors=INK, labelsize=9, length=3, labelbottom=True)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    ax.margins(x=0.02)


def _dress_twin(ax: Axes, twin: Axes, panel: Panel) -> None:
    """Two scales: each axis takes the colour of its line and says which one it is."""
    for axis, label, colour in ((ax, panel.left_label, panel.left[0].colour),
                                (twin, panel.right_label, panel.right[0].colour)):
        axis.set_ylabel(label, color=colour)
        axis.tick_params(axis="y", colors=colour, labelsize=9, length=3)
    for side in ("top", "left", "bottom"):
        twin.spines[side].set_visible(False)
    twin.spines["right"].set_color(GREY)
