"""The run around a trainer: its folder, what it says at the start, steps, evaluations, exports, trace and curve.

Owns the loop. What a step is belongs to the trainer that is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.config.load import to_tree, to_yaml
from hybridflow.config.schema import Config
from hybridflow.observe.phases import PhaseTimer
from hybridflow.observe.progress import open_console
from hybridflow.observe.run_view import RunView, ViewOptions
from hybridflow.observe.samples import RolloutSample
from hybridflow.observe.trace import Trace
from hybridflow.observe.trace_file import write_trace
from hybridflow.observe.trace_gather import gather_events
from hybridflow.parallel.world import World

Metrics = dict[str, float]


@dataclass(frozen=True)
class RunParts:
    """What a run repeats. Every function is collective.

    Attributes:
        step: takes the next data, gives metrics.
        export: writes the model to a folder.
        trace, timer: the trainer's; one step is traced, and evaluations are timed.
        labels: what each rank is, for the names of lanes.
        evaluate: held-out metrics; None never evaluates.
        answers: lines on the answers of the last evaluation, where they are kept.
        samples: some of the last step's work in words.
        trouble: a sentence on what went wrong in the last step, None if nothing did.
        stop_at_accuracy: held-out accuracy at which the run is over; None does every step.
    """

    step: Callable[[], Metrics]
    export: Callable[[Path], None]
    trace: Trace
    timer: PhaseTimer
    labels: Mapping[int, str]
    evaluate: Callable[[], Metrics] | None = None
    answers: Callable[[], list[dict[str, Any]]] = field(default=lambda: [])
    samples: Callable[[], list[RolloutSample]] = field(default=lambda: [])
    trouble: Callable[[], str | None] = field(default=lambda: None)
    stop_at_accuracy: float | None = None


class Run:
    """`total_steps` steps of `parts`, with evaluations before the first, every so many steps and after the last."""

    def __init__(self, config: Config, world: World, title: str, total_steps: int) -> None:
        self.config, self.world, self.total_steps = config, world, total_steps
        self.folder = Path(config.logging.dir)
        self.view = RunView(self._view_options(title), world.rank, open_console())
        if world.rank == 0:
            (self.folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")

    def _view_options(self, title: str) -> ViewOptions:
        logging = self.config.logging
        return ViewOptions(self.folder, title, self.total_steps, progress=logging.progress, num_samples=logging.samples,
                           wandb=logging.wandb, tensorboard=logging.tensorboard,
                           config=to_tree(self.config),
                           verl_ranks=self.world.size if logging.verl_names else None)

    def fit(self, parts: RunParts) -> None:
        """Do every step, then export and draw. Whatever happens, files are closed."""
        try:
            if parts.evaluate is not None:
                self.view.before_training(self._evaluate(parts))
                self.view.answers(0, parts.answers())
            for step in range(1, self.total_steps + 1):
                if self._step(parts, step):
                    break
            if self.config.checkpoint.export_at_end:
                self._export(parts, self.folder / "export")
        except BaseException:
            self.view.close()
            raise
        self.view.finish()

    def _step(self, parts: RunParts, step: int) -> bool:
        """One step and what goes with it; whether the run is over."""
        metrics = self._traced(parts) if self.config.logging.trace_step == step else parts.step()
        evaluates = parts.evaluate is not None and self._is_due(step, self.config.evaluation.every_steps, at_end=True)
        if evaluates:
            metrics |= self._evaluate(parts)
        self.view.step(step, metrics)
        if evaluates:
            self.view.answers(step, parts.answers())
        trouble = parts.trouble()
        if trouble is not None:
            self.view.say(f"Step {step}: {trouble}")
        self.view.samples(step, parts.samples(), shown=evaluates or step == 1)
        if self._is_due(step, self.config.checkpoint.export_every_steps):
            self._export(parts, self.folder / f"export_step{step}")
        wanted = parts.stop_at_accuracy
        if wanted is None or metrics.get("eval/accuracy", -1.0) < wanted:
            return False
        self.view.say(f"Held-out accuracy has reached {wanted}: {step} of {self.total_steps} steps were needed.")
        return True

    def _is_due(self, step: int, every: int | None, *, at_end: bool = False) -> bool:
        return every is not None and (step % every == 0 or (at_end and step == self.total_steps))

    def _evaluate(self, parts: RunParts) -> Metrics:
        """Held-out metrics and the seconds that they took; what else was timed is the step's, which has been taken."""
        assert parts.evaluate is not None
        metrics, timed = parts.evaluate(), parts.timer.take()
        return metrics | ({"time/evaluate": timed["time/evaluate"]} if metrics else {})

    def _export(self, parts: RunParts, folder: Path) -> None:
        parts.export(folder)
        self.view.say(f"Exported to {folder}")

    def _traced(self, parts: RunParts) -> Metrics:
        """A step with its trace written: a lane for each rank."""
        parts.trace.start()
        metrics = parts.step()
        parts.trace.stop()
        events = gather_events(self.world, parts.trace)
        if events is not None:
            write_trace(events, self.folder / "trace.json", parts.labels)
            self.view.say(f"Trace of this step: {self.folder / 'trace.json'} (open it in Perfetto)")
        return metrics
