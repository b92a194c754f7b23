"""`hybridflow reward_model`: a reward model from pairs, on all ranks."""

from __future__ import annotations

from hybridflow.commands.job import Job
from hybridflow.commands.preference import prepare_preference
from hybridflow.config.command import Command
from hybridflow.config.schema import Config
from hybridflow.trainer.preference import RewardModelTrainer
from hybridflow.trainer.preference_data import pair_rows


def prepare(config: Config) -> Job:
    """See `prepare_preference`."""
    return prepare_preference(config, Command.REWARD_MODEL, "reward model", pair_rows,
                              lambda inputs, world, held_out, rows: RewardModelTrainer(inputs, world, held_out))
