"""What `hybridflow schedule` says of a plan: its numbers, schedules compared, the simulated and the measured bubble.

Owns the report. The plan comes from a checked config (`schedule`); schedules, their simulation and their drawing are
`parallel.schedules`'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.commands.schedule import GivenCosts, Plan
from hybridflow.config.batch_math import BatchMath, aligned, counted
from hybridflow.config.layouts import Role, role_layout
from hybridflow.parallel.schedules.actions import COMPUTE, Schedule
from hybridflow.parallel.schedules.builders import ScheduleKind, activation_bound
from hybridflow.parallel.schedules.check import validate
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.schedules.draw import Clock, Panel, draw, require_picture
from hybridflow.parallel.schedules.simulate import Costs, simulate
from hybridflow.parallel.schedules.timeline import Timeline, per_chunk
from hybridflow.parallel.schedules.training import build

if TYPE_CHECKING:  # these bring torch, which faults must not wait for
    from hybridflow.models.config import ModelConfig
    from hybridflow.observe.trace_timeline import MeasuredUpdate

CHUNKED = (ScheduleKind.INTERLEAVED, ScheduleKind.ZB_V)


@dataclass(frozen=True)
class StageCosts:
    """Seconds that one micro-batch takes in a whole stage, and a message on a link, so that schedules with different
    chunks can be compared. Example: `StageCosts(0.010, 0.010, 0.008).of(Chunks(4, 2)).forward == 0.005`.

    Attributes:
        alpha, beta, message_bytes: of a message, as in `Costs`.
        clock: FORWARDS where nothing is known and F, B and W count 1.
    """

    forward: float
    backward: float
    weight: float
    alpha: float = 0.0
    beta: float = 0.0
    message_bytes: float = 0.0
    clock: Clock = Clock.SECONDS

    @classmethod
    def averaged(cls, costs: Costs, chunks: Chunks) -> StageCosts:
        """The mean over the stages of costs that are given for each chunk."""
        return cls(*(sum(per_chunk(value, chunk) for chunk in range(chunks.count)) / chunks.pp
                     for value in (costs.forward, costs.backward, costs.weight)),
                   costs.alpha, costs.beta, costs.message_bytes)

    def of(self, chunks: Chunks) -> Costs:
        """The same for each chunk, where a stage's layers are shared out evenly to its chunks."""
        return Costs(*(value / chunks.vpp for value in (self.forward, self.backward, self.weight)), alpha=self.alpha,
                     beta=self.beta, message_bytes=self.message_bytes)


def report(plan: Plan, given: GivenCosts | None, trace: Path | None, picture: Path | None, with_text: bool) -> str:
    """Prove and simulate a plan, and say what came of it; draw it too where `picture` is given.

    Args:
        given: None: the costs of the trace, or 1 each.
        trace: of a run of this plan's config, to be drawn below the simulation. None: nothing was measured.
        with_text: whether to add the schedule itself.
    Raises:
        ValueError: a picture of no known kind, a trace that cannot be used, or a link's rate without the model's shape.
    """
    if picture is not None:
        require_picture(picture)
    shape, measured = _shape(plan), None if trace is None else _read(trace, plan)
    if measured is not None:
        plan = replace(plan, num_micro_batches=measured.schedule.num_micro_batches, at_most=False,
                       world_size=measured.layout.size)
    stage_costs = _stage_costs(plan, given, shape)
    costs, schedule = stage_costs.of(plan.chunks), _proved(plan) if measured is None else measured.schedule
    if measured is not None and given is None:
        from hybridflow.observe.trace_timeline import estimated_costs

        costs = estimated_costs(measured)
        stage_costs = StageCosts.averaged(costs, plan.chunks)
    panels = [Panel("simulated", simulate(schedule, costs))]
    if measured is not None:
        panels.append(Panel("measured", measured.timeline))
    parts = [_numbers(plan, stage_costs, measured), _comparison(plan, stage_costs, panels[0].timeline, shape),
             _activations(plan, schedule, shape), _outcome(panels)]
    if measured is not None and given is None and plan.chunks.pp > 1:
        parts[1] += f"\n{_assumption(schedule)}"
    if with_text:
        parts.append(schedule.to_text())
    if picture is not None:
        draw(picture, _title(plan), panels, stage_costs.clock)
        parts.append(f"Drawn in {picture}")
    return "\n\n".join(parts)


def _proved(plan: Plan) -> Schedule:
    schedule = build(plan.kind, plan.chunks, plan.num_micro_batches)
    validate(schedule, activation_bound(plan.kind, plan.chunks, plan.num_micro_batches))
    return schedule


def _read(trace: Path, plan: Plan) -> MeasuredUpdate:
    """Raises:
        ValueError: no trace of a run with this plan's layout and schedule.
    """
    from hybridflow.observe.trace_timeline import read_update

    layout = role_layout(plan.config, Role.ACTOR, plan.world_size)
    measured = read_update(trace, plan.chunks, layout.tp, layout.cp, layout.dp if plan.world_given else None)
    computed = tuple(tuple(action for action in actions if action.kind in COMPUTE)
                     for actions in measured.schedule.stages)
    if computed != plan.kind.compute(plan.chunks, measured.schedule.num_micro_batches).stages:
        raise ValueError(f"{trace} is of a run with another schedule than train.schedule = {plan.kind.value}: give the "
                         "config of that run")
    return measured


def _shape(plan: Plan) -> ModelConfig | None:
    """The actor's; None where it is in a folder that is not here."""
    from hybridflow.config.shapes import spec_decoder
    from hybridflow.models.config import ModelConfig

    model = plan.config.model
    if model.path is None:
        return spec_decoder(model.spec, vocab_size=0)
    return ModelConfig.from_hf_folder(model.path) if (Path(model.path) / "config.json").exists() else None


def _stage_costs(plan: Plan, given: GivenCosts | None, shape: ModelConfig | None) -> StageCosts:
    """Those given, or 1 each."""
    if given is None:
        return StageCosts(1.0, 1.0, 1.0, clock=Clock.FORWARDS)
    size = 0 if given.bytes_per_second == inf or plan.chunks.pp == 1 else _message_bytes(plan, shape)
    return StageCosts(given.forward, given.backward, given.weight, given.latency, 1 / given.bytes_per_second, size)


def _message_bytes(plan: Plan, shape: ModelConfig | None) -> int:
    """Of the largest message between stages, [tokens (/tp where sequence parallel), hidden]: the longest rows.

    Raises:
        ValueError: the shape of the model is not known.
    """
    from hybridflow.trainer.activations import longest_rows
    from hybridflow.trainer.engine_options import DTYPES

    if shape is None:
        raise ValueError(f"--costs: the bytes of a message follow from the model's shape, and {plan.config.model.path} "
                         "is not here; leave the GB/s away, or give the time of a whole message as the latency")
    layout, math = role_layout(plan.config, Role.ACTOR, plan.world_size), BatchMath.of(plan.config, plan.world_size)
    split = layout.tp if layout.sequence_parallel else 1
    tokens = longest_rows(plan.config, math, layout.cp, split).num_tokens // split
    return tokens * shape.hidden_size * DTYPES[plan.config.train.mixed_precision].itemsize


def _numbers(plan: Plan, costs: StageCosts, measured: MeasuredUpdate | None) -> str:
    """The layout, the batch, and what the pipeline makes of them, a line each."""
    math = BatchMath.of(plan.config, plan.world_size)
    lines = [
        f"{_degrees(plan)}, {counted(plan.world_size, 'rank')}",
        f"{counted(math.rollouts_per_update, 'row')} per update, {math.share_line()}",
        f"simulated: {plan.kind.value} with {counted(plan.chunks.pp, 'stage')} of {counted(plan.chunks.vpp, 'chunk')}, "
        f"{'at most ' if plan.at_most else ''}{_micro_batches(plan)}",
    ]
    if costs.message_bytes:
        lines.append(f"a message of the longest rows has {costs.message_bytes:.4g} bytes and takes "
                     f"{1e3 * costs.of(plan.chunks).message:.3g} ms on its link")
    if measured is not None:
        which = "" if measured.num_updates == 1 else ", the last of those with the most micro-batches"
        lines.append(f"measured: update {measured.place + 1} of {measured.num_updates} in the trace{which}")
    return "\n".join(lines)


def _degrees(plan: Plan) -> str:
    layout = role_layout(plan.config, Role.ACTOR, plan.world_size)
    context = f" x cp {layout.cp}" if layout.cp > 1 else ""
    return f"tp {layout.tp}{context} x pp {layout.pp} x dp {layout.dp}"


def _title(plan: Plan) -> str:
    chunks = f" of {plan.chunks.vpp} chunks" if plan.chunks.vpp > 1 else ""
    return (f"{plan.kind.value}: {counted(plan.chunks.pp, 'stage')}{chunks}, "
            f"{_micro_batches(plan)}   ({_degrees(plan)})")


def _micro_batches(plan: Plan) -> str:
    return counted(plan.num_micro_batches, "micro-batch")


def _comparison(plan: Plan, stage_costs: StageCosts, own: Timeline, shape: ModelConfig | None) -> str:
    """A line for each schedule that this pipeline could have, the config's own marked, and why others are left out.

    Args:
        own: what was simulated of the config's own.
    """
    time = "forwards" if stage_costs.clock is Clock.FORWARDS else "ms"
    factor = 1.0 if stage_costs.clock is Clock.FORWARDS else 1e3
    rows, notes = [("", "schedule", "vpp", "bubble", f"time ({time})", "micro-batches held by each stage at most")], []
    for kind in ScheduleKind if plan.chunks.pp > 1 else (plan.kind,):
        chunks = plan.chunks if kind is plan.kind else kind.chunks(plan.chunks.pp, 2 if kind in CHUNKED else 1)
        if kind is not plan.kind and shape is not None and shape.num_layers < chunks.count:
            notes.append(f"{kind.value} is left out: {counted(shape.num_layers, 'layer')} cannot fill its "
                         f"{chunks.count} chunks ({chunks.pp} stages of {chunks.vpp})")
            continue
        timeline = own if kind is plan.kind else simulate(build(kind, chunks, plan.num_micro_batches),
                                                          stage_costs.of(chunks))
        held = " ".join(f"{peak:.3g}" for peak in timeline.peak_activations(1 / chunks.vpp))
        rows.append(("*" if kind is plan.kind else "", kind.value, str(chunks.vpp),
                     _percent(timeline.bubble_fraction), f"{factor * timeline.makespan:.4g}", held))
    if plan.chunks.pp == 1:
        notes.append("the other schedules are left out: one stage has no bubble")
    return "\n".join([aligned(rows), *notes])


def _assumption(schedule: Schedule) -> str:
    """What the comparison takes for granted where the costs are a trace's."""
    halves = "" if schedule.splits_backward else ", and half of a backward to be weight gradients"
    return f"* has the measured costs of each chunk; the other rows take all stages to cost their mean{halves}."


def _activations(plan: Plan, schedule: Schedule, shape: ModelConfig | None) -> str:
    """What the stages keep in bytes, where the model's shape is at hand."""
    from hybridflow.trainer.activations import activation_line

    if shape is None:
        return f"Activations in bytes: not known without the model's shape, and {plan.config.model.path} is not here."
    return activation_line(plan.config, plan.world_size, shape, schedule)


def _outcome(panels: list[Panel]) -> str:
    bubbles = [f"{panel.name} {_percent(panel.timeline.bubble_fraction)}" for panel in panels]
    return f"Bubble: {', '.join(bubbles)} of the time from the first to the last computation."


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"
