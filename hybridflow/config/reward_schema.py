"""The keys of the `reward` block: type, default and, in the line under it, what a key does.

See `schema`, which holds the rest; it checks and derives nothing either.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridflow.config.model_schema import RewardModelConfig
from hybridflow.config.words import GymScoring

# drop, zero, error, or the score itself.
OnFault = str | int | float


@dataclass(frozen=True)
class OnFaultConfig:
    """What becomes of a row whose reward failed, by cause; it is counted in any case."""

    raised: OnFault = "drop"
    """The function raised: drop (not trained) | zero | error (the run ends, on every rank) | a number, the score."""
    timed_out: OnFault = "drop"
    """It took longer than reward.timeout_s."""
    not_finite: OnFault = "drop"
    """It returned NaN or infinity; a reward model's score is neither."""
    wrong_type: OnFault = "drop"
    """It returned something that is no number, nor a dict with one under "score"."""
    crashed: OnFault = "drop"
    """It took its process down."""
    out_of_memory: OnFault = "drop"
    """It took more than reward.memory_mb, or than the machine had."""


@dataclass(frozen=True)
class RewardPartConfig:
    """One part of a reward that is a weighted sum; it has a function, a reasoning_gym scorer or a model."""

    name: str = ""
    """What its metrics are called: reward/part_NAME."""
    weight: float = 1.0
    """Its factor in the sum. 0: it is measured only."""
    function: str | None = None
    """As reward.function."""
    reasoning_gym: GymScoring | None = None
    """As reward.reasoning_gym."""
    model: str | None = None
    """As model.reward_model.path, whose other keys it has too."""
    data_sources: list[str] = field(default_factory=list)
    """The data sources (of reasoning_gym: tasks) whose rows it scores. Empty: all."""
    on_fault: OnFaultConfig | None = None
    """As reward.on_fault. null: the same as there."""


@dataclass(frozen=True)
class RewardConfig:
    """Where rewards come from, and what becomes of rows that have none."""

    function: str | None = None
    """file.py:function, called with (data_source, solution_str, ground_truth, extra_info). null: the task's scorer."""
    batched: bool | None = None
    """One call for all rows of a rank, with lists (data_sources, solution_strs, ...). null: as its signature says."""
    reasoning_gym: GymScoring = GymScoring.EXACT
    """Score of a reasoning-gym answer: exact (1 or 0) | partial (the task's own part credit)."""
    mixture: list[RewardPartConfig] = field(default_factory=list)
    """Parts whose weighted sum is the reward, in the place of one function or model. Empty: there is only one."""
    timeout_s: float = 10.0
    """Longest time for one call, of a row or, batched, of all; then the worker is killed, and a new one goes on."""
    memory_mb: int | None = None
    """Memory in MiB that each process of a function may take beyond what its imports took. null: no limit."""
    workers: int | None = None
    """Worker processes of each rank and function. null: one, and up to 8 while rows are slow."""
    on_fault: OnFaultConfig = field(default_factory=OnFaultConfig)
    """What becomes of rows whose reward failed."""


def reward_models(reward: RewardConfig, model: RewardModelConfig) -> dict[str, str]:
    """The folders of reward models, by the key that names them."""
    named = {"model.reward_model.path": model.path}
    named |= {f"reward.mixture[{place}].model": part.model for place, part in enumerate(reward.mixture)}
    return {key: path for key, path in named.items() if path is not None}


def reward_functions(reward: RewardConfig) -> dict[str, str]:
    """The functions that are named (file.py:function), by their key."""
    named = {"reward.function": reward.function}
    named |= {f"reward.mixture[{place}].function": part.function for place, part in enumerate(reward.mixture)}
    return {key: spec for key, spec in named.items() if spec is not None}


def asks_task_scorers(reward: RewardConfig, model: RewardModelConfig) -> bool:
    """Whether the scorers of reasoning-gym tasks judge, alone or in a mixture."""
    if reward.mixture:
        return any(part.reasoning_gym is not None for part in reward.mixture)
    return reward.function is None and model.path is None
