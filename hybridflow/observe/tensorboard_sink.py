"""Metrics to TensorBoard event files. The only module that knows of TensorBoard, and imports it only when chosen."""

from __future__ import annotations

from pathlib import Path

from hybridflow.observe.metric_log import Say


class TensorBoardSink:
    """Event files under one folder; `tensorboard --logdir FOLDER` shows them."""

    def __init__(self, folder: Path) -> None:
        """Open the event file.

        Raises:
            ImportError: TensorBoard is not installed.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Add one scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write out what is buffered."""
        self._writer.close()


def open_tensorboard(folder: Path, say: Say) -> TensorBoardSink | None:
    """The sink; None, with one sentence of why, where TensorBoard is not installed: it is an optional extra."""
    try:
        return TensorBoardSink(folder)
    except ImportError:
        say("logging.tensorboard is set, but TensorBoard is not installed (pip install tensorboard): "
            "no event files are written, all metrics are in metrics.jsonl.")
        return None
