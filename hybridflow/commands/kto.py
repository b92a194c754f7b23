"""`hybridflow kto`: Kahneman-Tversky optimisation from a config, on all ranks."""

from __future__ import annotations

from hybridflow.commands.job import Job
from hybridflow.commands.preference import prepare_preference
from hybridflow.config.command import Command
from hybridflow.config.schema import Config
from hybridflow.trainer.preference import KtoTrainer
from hybridflow.trainer.preference_data import label_rows, require_weighed


def prepare(config: Config) -> Job:
    """See `prepare_preference`."""
    return prepare_preference(config, Command.KTO, "Kahneman-Tversky optimisation", label_rows,
                              lambda inputs, world, held_out, rows: KtoTrainer(inputs, world, held_out),
                              require_weighed)
