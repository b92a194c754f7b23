"""Everything that shows a run, opened together and closed together.

Owns which files lie where in the run folder: metrics.jsonl, samples.jsonl, evaluations.jsonl,
learning_curve.png, wandb/, tensorboard/.
It is rank 0's; on the other ranks every call does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from hybridflow.config.words import WandbMode
from hybridflow.observe.jsonl import JsonlFile
from hybridflow.observe.metric_log import JsonlSink, MetricLog, MetricSink, read_metrics
from hybridflow.observe.progress import choose_style, open_progress
from hybridflow.observe.samples import RolloutSample, SampleLog
from hybridflow.observe.summary import summarise
from hybridflow.observe.tensorboard_sink import open_tensorboard
from hybridflow.observe.verl_names import verl_metrics
from hybridflow.observe.wandb_sink import WandbSink


@dataclass(frozen=True)
class ViewOptions:
    """What is shown and where. Example: `ViewOptions(Path("runs/a"), "ppo_tiny", total_steps=50)`.

    `first_step` is above 1 in a resumed run, which continues the files; otherwise they begin anew and earlier ones are
    kept as `*.previous.jsonl`. `num_samples` is the number of rollouts in a table. `config` is handed to wandb.
    `verl_ranks`: the world's size where metrics are logged under verl's names too, None where they are not.
    """

    run_dir: Path
    title: str
    total_steps: int
    first_step: int = 1
    progress: bool = True
    num_samples: int = 4
    wandb: WandbMode = WandbMode.OFF
    tensorboard: bool = False
    strict: bool = False
    config: dict[str, object] = field(default_factory=dict)
    verl_ranks: int | None = None

    @property
    def resumes(self) -> bool:
        return self.first_step > 1


class RunView:
    """A run as its user sees it. Example:

        view = RunView(options, world.rank, open_console())
        view.say("The actor trains at tp2 pp2 dp1.")
        view.before_training({"eval/accuracy": 0.25})
        view.step(1, metrics)
        view.samples(1, [RolloutSample("2+2=", "4", "4", 1.0)])
        view.finish()
    """

    def __init__(self, options: ViewOptions, rank: int, console: Console) -> None:
        """Open every sink that `options` choose.

        Raises:
            ValueError: wandb is chosen and not installed.
        """
        self._options = options
        self._is_shown = rank == 0
        self._console = console
        ranks = options.verl_ranks
        renamed = None if ranks is None else lambda step, metrics: verl_metrics(step, metrics, ranks)
        self._metrics = MetricLog(self._open_sinks() if self._is_shown else [], self.say, strict=options.strict,
                                  renamed=renamed)
        self._samples = (SampleLog(options.run_dir / "samples.jsonl", console, resume=options.resumes)
                         if self._is_shown else None)
        self._answers: JsonlFile | None = None
        style = choose_style(rank=rank, wanted=options.progress, is_terminal=console.is_terminal)
        self._progress = open_progress(style, options.total_steps, console, options.first_step)

    def say(self, sentence: str) -> None:
        """Print a sentence, above the bar if there is one."""
        if self._is_shown:
            self._console.print(Text(sentence), soft_wrap=True)

    def before_training(self, metrics: dict[str, float]) -> None:
        """Log what was measured before the first step, as step 0."""
        self._metrics.log(0, metrics)
        if "eval/accuracy" in metrics:
            self.say(f"Before training, held-out accuracy is {metrics['eval/accuracy']:.3f}.")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """A step (the first is 1) is done: log its metrics and show progress."""
        self._metrics.log(step, metrics)
        self._progress.step(step, metrics)

    def samples(self, step: int, samples: Sequence[RolloutSample], *, shown: bool = True) -> None:
        """Keep the first `num_samples` rollouts of a step, and show them if `shown`."""
        if self._samples is not None:
            self._samples.take(step, samples[: self._options.num_samples], shown=shown)

    def answers(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Keep the answers of an evaluation."""
        if not self._is_shown or not lines:
            return
        if self._answers is None:
            self._answers = JsonlFile(self._options.run_dir / "evaluations.jsonl", resume=self._options.resumes)
        for line in lines:
            self._answers.write({"step": step, **line})

    def close(self) -> None:
        """Close files and leave the terminal in order; enough for a run that failed."""
        self._progress.close()
        self._metrics.close()
        for file in (self._samples, self._answers):
            if file is not None:
                file.close()

    def finish(self) -> None:
        """Close, draw the learning curve and print the summary."""
        self.close()
        self.sum_up()

    def sum_up(self) -> None:
        """Draw the learning curve and print the summary of the steps so far; more may follow."""
        if not self._is_shown:
            return
        self.say(summarise(read_metrics(self._metrics_path)))
        from hybridflow.observe.curve import draw_curve  # matplotlib: half a second that only rank 0 spends, at the end

        curve = self._options.run_dir / "learning_curve.png"
        if draw_curve(self._metrics_path, curve, self._options.title):
            self.say(f"Learning curve: {curve}")

    @property
    def _metrics_path(self) -> Path:
        return self._options.run_dir / "metrics.jsonl"

    def _open_sinks(self) -> list[MetricSink]:
        options = self._options
        sinks: list[MetricSink] = [JsonlSink(self._metrics_path, self.say, resume=options.resumes)]
        if options.wandb is not WandbMode.OFF:
            sinks.append(WandbSink(options.wandb, options.run_dir, options.title, options.config))
        if options.tensorboard:
            board = open_tensorboard(options.run_dir / "tensorboard", self.say)
            sinks += [] if board is None else [board]
        return sinks
