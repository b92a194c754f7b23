"""What `hybridflow schedule` says of a plan: its numbers, schedules compared, the simulated and the measured bubble.

Owns the report. The plan comes from a checked config (`schedule`); schedules, their simulation and their drawing are
`parallel.schedules`'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hybridflow.commands.schedule import Plan
from hybridflow.config.batch_math import BatchMath, aligned, counted
from hybridflow.config.layouts import Role, role_layout
from hybridflow.parallel.schedules.actions import Schedule
from hybridflow.parallel.schedules.builders import ScheduleKind, activation_bound
from hybridflow.parallel.schedules.check import validate
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.schedules.draw import Clock, Panel, draw, require_picture
from hybridflow.parallel.schedules.simulate import Costs, simulate
from hybridflow.parallel.schedules.timeline import per_chunk
from hybridflow.parallel.schedules.training import build


@dataclass(frozen=True)
class StageCosts:
    """Seconds that one micro-batch takes in a whole stage, and a message on a link, so that schedules with different
    chunks can be compared. Example: `StageCosts(0.010, 0.010, 0.008).of(Chunks(4, 2)).forward == 0.005`.

    `clock` is FORWARDS where nothing is known and all three count 1.
    """

    forward: float
    backward: float
    weight: float
    message: float = 0.0
    clock: Clock = Clock.SECONDS

    @classmethod
    def averaged(cls, costs: Costs, chunks: Chunks) -> StageCosts:
        """The mean over the stages of costs that are given for each chunk."""
        return cls(*(sum(per_chunk(value, chunk) for chunk in range(chunks.count)) / chunks.pp
                     for value in (costs.forward, costs.backward, costs.weight)), costs.message)

    def of(self, chunks: Chunks) -> Costs:
        """The same for each chunk, where a stage's layers are shared out evenly to its chunks."""
        return Costs(*(value / chunks.vpp for value in (self.forward, self.backward, self.weight)), alpha=self.message)


def report(plan: Plan, times: tuple[float, ...] | None, trace: Path | None, picture: Path | None,
           with_text: bool) -> str:
    """Prove and simulate a plan, and say what came of it; draw it too where `picture` is given.

    Args:
        times: of `StageCosts`, in seconds; None: those of the trace, or 1 each.
        trace: of a run of this plan's config, to be drawn below the simulation. None: nothing was measured.
        with_text: whether to add the schedule itself.
    Raises:
        ValueError: a picture of no known kind, or a trace that cannot be used.
    """
    if picture is not None:
        require_picture(picture)
    stage_costs = StageCosts(1.0, 1.0, 1.0, clock=Clock.FORWARDS) if times is None else StageCosts(*times)
    costs, schedule, panels = stage_costs.of(plan.chunks), None, []
    if trace is not None:
        from hybridflow.observe.trace_timeline import estimated_costs, read_update  # brings torch

        measured = read_update(trace, plan.chunks)
        schedule, panels = measured.schedule, [Panel("measured", measured.timeline)]
        plan = replace(plan, num_micro_batches=schedule.num_micro_batches, at_most=False)
        if times is None:
            costs = estimated_costs(measured)
            stage_costs = StageCosts.averaged(costs, plan.chunks)
    if schedule is None:
        schedule = build(plan.kind, plan.chunks, plan.num_micro_batches)
        validate(schedule, activation_bound(plan.kind, plan.chunks, plan.num_micro_batches))
    panels = [Panel("simulated", simulate(schedule, costs)), *panels]
    parts = [_numbers(plan), _comparison(plan, stage_costs), _activations(plan, schedule), _outcome(panels)]
    if with_text:
        parts.append(schedule.to_text())
    if picture is not None:
        draw(picture, _title(plan), panels, stage_costs.clock)
        parts.append(f"Drawn in {picture}")
    return "\n\n".join(parts)


def _numbers(plan: Plan) -> str:
    """The layout, the batch, and what the pipeline makes of them, a line each."""
    math = BatchMath.of(plan.config, plan.world_size)
    return "\n".join([
        f"{_degrees(plan)}, {counted(plan.world_size, 'rank')}",
        f"{counted(math.rollouts_per_update, 'row')} per update, {math.share_line()}",
        f"simulated: {plan.kind.value} with {counted(plan.chunks.pp, 'stage')} of {counted(plan.chunks.vpp, 'chunk')}, "
        f"{'at most ' if plan.at_most else ''}{_micro_batches(plan)}",
    ])


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


def _comparison(plan: Plan, stage_costs: StageCosts) -> str:
    """A line for each schedule that this pipeline could have, the config's own marked. One stage has no choice."""
    time = "forwards" if stage_costs.clock is Clock.FORWARDS else "ms"
    factor = 1.0 if stage_costs.clock is Clock.FORWARDS else 1e3
    rows = [("", "schedule", "vpp", "bubble", f"time ({time})", "micro-batches held by each stage at most")]
    for kind in ScheduleKind:
        chunks = plan.chunks if kind is plan.kind else _chunks_for(kind, plan)
        if chunks is None or (chunks.pp == 1 and kind is not plan.kind):
            continue
        timeline = simulate(build(kind, chunks, plan.num_micro_batches), stage_costs.of(chunks))
        held = " ".join(f"{peak:.3g}" for peak in timeline.peak_activations(1 / chunks.vpp))
        rows.append(("*" if kind is plan.kind else "", kind.value, str(chunks.vpp),
                     _percent(timeline.bubble_fraction), f"{factor * timeline.makespan:.4g}", held))
    return aligned(rows)


def _chunks_for(kind: ScheduleKind, plan: Plan) -> Chunks | None:
    """The chunks that a schedule would have here; None where the layers of a new model are too few for them."""
    spec, pp = plan.config.model.spec, plan.chunks.pp
    has_chunks = kind in (ScheduleKind.INTERLEAVED, ScheduleKind.ZB_V) and pp > 1
    vpp = 2 if has_chunks else 1
    return None if spec is not None and spec.num_layers < pp * vpp else kind.chunks(pp, vpp)


def _activations(plan: Plan, schedule: Schedule) -> str:
    """What the stages keep in bytes, where the model's shape is at hand."""
    from hybridflow.config.shapes import spec_decoder  # these bring torch, which faults must not wait for
    from hybridflow.models.config import ModelConfig
    from hybridflow.trainer.activations import activation_line

    model = plan.config.model
    if model.path is not None and not (Path(model.path) / "config.json").exists():
        return f"Activations in bytes: not known without the model's shape, and {model.path} is not here."
    shape = spec_decoder(model.spec, vocab_size=0) if model.path is None else ModelConfig.from_hf_folder(model.path)
    return activation_line(plan.config, plan.world_size, shape, schedule)


def _outcome(panels: list[Panel]) -> str:
    bubbles = [f"{panel.name} {_percent(panel.timeline.bubble_fraction)}" for panel in panels]
    return f"Bubble: {', '.join(bubbles)} of the time from the first to the last computation."


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"
