"""The run around a trainer: its folder, what it says at the start, steps, evaluations, exports, trace and curve.

Owns the loop. What a step is belongs to the trainer that is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hybridflow.config.load import to_tree, to_yaml
from hybridflow.config.schema import Config
from hybridflow.observe.progress import open_console
from hybridflow.observe.run_view import RunView, ViewOptions
from hybridflow.observe.samples import RolloutSample
from hybridflow.observe.trace import Trace
from hybridflow.observe.trace_file import write_trace
from hybridflow.observe.trace_gather import gather_events
from hybridflow.parallel.mesh import Grid
from hybridflow.parallel.world import World

Metrics = dict[str, float]


@dataclass(frozen=True)
class RunParts:
    """What a run repeats. Every function is collective.

    Attributes:
        step: takes the next data, gives metrics.
        evaluate: held-out metrics, {} where there are none.
        export: writes the model to a folder.
        samples: some of the last step's work in words.
        trace: recorded in the step that the config chooses.
        timing: metrics of what was timed since the last call (the evaluation's, when a step has taken its own).
        grid: the actor's training grid, for names of lanes.
    """

    step: Callable[[], Metrics]
    evaluate: Callable[[], Metrics]
    export: Callable[[Path], None]
    trace: Trace
    grid: Grid
    timing: Callable[[], Metrics]
    samples: Callable[[], list[RolloutSample]] = field(default=lambda: [])


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
                           config=to_tree(self.config))

    def fit(self, parts: RunParts) -> None:
        """Do every step, then export and draw. Whatever happens, files are closed."""
        try:
            self._evaluate_first(parts)
            for step in range(1, self.total_steps + 1):
                self._step(parts, step)
            if self.config.checkpoint.export_at_end:
                self._export(parts, self.folder / "export")
        except BaseException:
            self.view.close()
            raise
        self.view.finish()

    def _evaluate_first(self, parts: RunParts) -> None:
        if self.config.evaluation.every_steps is None:
            return
        metrics = parts.evaluate()
        if metrics:
            self.view.before_training(metrics | _evaluation_time(parts))

    def _step(self, parts: RunParts, step: int) -> None:
        traced = self.config.logging.trace_step == step
        if traced:
            parts.trace.start()
        metrics = parts.step()
        if traced:
            parts.trace.stop()
            self._write_trace(parts)
        every = self.config.evaluation.every_steps
        if every is not None and (step % every == 0 or step == self.total_steps):
            metrics |= parts.evaluate()
            metrics |= _evaluation_time(parts)
        self.view.step(step, metrics)
        self.view.samples(step, parts.samples())
        if self._exports_at(step):
            self._export(parts, self.folder / f"export_step{step}")

    def _exports_at(self, step: int) -> bool:
        every = self.config.checkpoint.export_every_steps
        return every is not None and step % every == 0

    def _export(self, parts: RunParts, folder: Path) -> None:
        parts.export(folder)
        self.view.say(f"Exported to {folder}")

    def _write_trace(self, parts: RunParts) -> None:
        events = gather_events(self.world, parts.trace)
        if events is None:
            return
        places = {rank: parts.grid.coord(rank) for rank in range(self.world.size)}
        labels = {rank: f"tp {at.tp}, dp {at.dp}, pp {at.pp}" for rank, at in places.items()}
        write_trace(events, self.folder / "trace.json", labels)
        self.view.say(f"Trace of this step: {self.folder / 'trace.json'} (open it in Perfetto)")



def _evaluation_time(parts: RunParts) -> Metrics:
    """The evaluation's seconds; the rest of what was timed is the step's, which has been taken."""
    timed = parts.timing()
    return {"time/evaluate": timed["time/evaluate"]} if "time/evaluate" in timed else {}
