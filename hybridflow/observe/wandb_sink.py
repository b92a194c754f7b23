"""Metrics to Weights & Biases. The only module that knows of wandb, and imports it only when chosen."""

from __future__ import annotations

from pathlib import Path

from hybridflow.config.words import WandbMode


class WandbSink:
    """One wandb run. Offline it needs neither account nor network, and `wandb sync` uploads it later.

    A resumed job starts a further wandb run of the same name.
    """

    def __init__(self, mode: WandbMode, run_dir: Path, name: str, config: dict[str, object]) -> None:
        """Start a run that keeps its files in `run_dir/wandb` and prints nothing.

        Raises:
            ValueError: wandb is not installed.
            wandb.errors.UsageError: online without a login.
        """
        assert mode is not WandbMode.OFF
        try:
            import wandb
        except ImportError as error:
            raise ValueError(f"logging.wandb={mode.value} needs the package wandb, which is not installed: "
                             "pip install wandb, or set logging.wandb=off") from error
        run_dir.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb
        self._run = wandb.init(
            project="hybridflow",
            name=name,
            dir=run_dir,
            mode=mode.value,
            config=config,
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=mode is WandbMode.OFFLINE),
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of one step."""
        self._run.log(metrics, step=step)

    def close(self) -> None:
        """Finish the run and wait until everything is written (online: uploaded)."""
        self._run.finish()
        # wandb 0.31: an offline finish() returns before its service process has written the last records (seen: a file
        # of 7 bytes, whole 0.3 s later). teardown() waits for that process to end.
        self._wandb.teardown()
