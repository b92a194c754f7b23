"""`hybridflow dpo`: direct preference optimisation from a config, on all ranks."""

from __future__ import annotations

from hybridflow.commands.job import Job
from hybridflow.commands.preference import prepare_preference
from hybridflow.config.command import Command
from hybridflow.config.schema import Config
from hybridflow.trainer.preference import DpoTrainer
from hybridflow.trainer.preference_data import pair_rows


def prepare(config: Config) -> Job:
    """See `prepare_preference`."""
    return prepare_preference(config, Command.DPO, "direct preference optimisation", pair_rows,
                              lambda inputs, world, held_out, rows: DpoTrainer(
                                  inputs, world, held_out, lambda: [rows.example(row) for row in rows.kept]))
