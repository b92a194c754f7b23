"""Which roles a run has, and the layout of each on a world of a given size.

Pure arithmetic on the config; process groups are `parallel`'s. Layouts that do not fit are `validate`'s to report.
"""

from __future__ import annotations

import re
from dataclasses import replace
from enum import Enum

from hybridflow.algorithms.registry import Need
from hybridflow.config.command import Command
from hybridflow.config.model_schema import LayoutConfig
from hybridflow.config.recipe import kl_where_of, needs_of
from hybridflow.config.reward_rules import scored_on_a_mesh
from hybridflow.config.reward_schema import asks_task_scorers
from hybridflow.config.schema import Config
from hybridflow.config.words import DataSource, KLWhere


class Role(Enum):
    """A model that takes part in a step."""

    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "reference"
    REWARD = "reward"
    COST = "cost"
    COST_CRITIC = "cost_critic"


MOST_RANKS = 2**20  # of a world
LEARNING = (Role.ACTOR, Role.CRITIC, Role.COST_CRITIC)  # the others only score


def roles(config: Config) -> tuple[Role, ...]:
    """The roles that this config needs. A reward model that is no decoder of ours is none: it has no layout."""
    has_critic = Need.CRITIC in needs_of(config.algorithm)
    has_reference = kl_where_of(config.algorithm) is not KLWhere.NONE
    has_reward = scored_on_a_mesh(config)
    has_costs = Need.COST in needs_of(config.algorithm)
    needed = {Role.ACTOR: True, Role.CRITIC: has_critic, Role.REFERENCE: has_reference, Role.REWARD: has_reward,
              Role.COST: has_costs and config.model.cost_model.path is not None, Role.COST_CRITIC: has_costs}
    return tuple(role for role in Role if needed[role])


def used_roles(config: Config, command: Command) -> tuple[Role, ...]:
    """The roles that `command` needs. A reward model judges held-out answers of what learns from given ones too. What
    `reward_model` trains has the actor's place.
    """
    if command in (Command.TRAIN, Command.API):
        return roles(config)
    has_reference = command in (Command.DPO, Command.KTO)
    answered = command is Command.SFT or answers_held_out(config, command)
    needed = {Role.ACTOR: True, Role.REFERENCE: has_reference, Role.REWARD: answered and scored_on_a_mesh(config)}
    return tuple(role for role in needed if needed[role])


def answers_held_out(config: Config, command: Command) -> bool:
    """Whether held-out prompts are answered while `command` trains: where it evaluates a language model and,
    with prompts that come from files of preferences, something is named that judges the answers.
    """
    if command is Command.REWARD_MODEL or config.evaluation.every_steps is None:
        return False
    judged = bool(config.reward.mixture) or not asks_task_scorers(config.reward, config.model.reward_model)
    return not command.prefers or judged or config.data.source is DataSource.REASONING_GYM


def layout_key(config: Config, role: Role) -> str:
    """The dotted key of the block that gives a role's layout: its own, or train.layout."""
    own = {
        Role.ACTOR: ("train.layout", config.train.layout),
        Role.CRITIC: ("model.critic.layout", config.model.critic.layout),
        Role.REFERENCE: ("model.reference.layout", config.model.reference.layout),
        Role.REWARD: ("model.reward_model.layout", config.model.reward_model.layout),
        Role.COST: ("model.cost_model.layout", config.model.cost_model.layout),
        Role.COST_CRITIC: ("model.cost_critic.layout", config.model.cost_critic.layout),
    }
    key, layout = own[role]
    return "train.layout" if layout is None else key


def written_layout(config: Config, role: Role) -> LayoutConfig:
    """A role's layout as written: dp may still be null."""
    own = {
        Role.ACTOR: config.train.layout,
        Role.CRITIC: config.model.critic.layout,
        Role.REFERENCE: config.model.reference.layout,
        Role.REWARD: config.model.reward_model.layout,
        Role.COST: config.model.cost_model.layout,
        Role.COST_CRITIC: config.model.cost_critic.layout,
    }
    return own[role] or config.train.layout


def role_layout(config: Config, role: Role, world_size: int) -> LayoutConfig:
    """A role's layout on its ranks of `world_size`, dp filled in. Example: tp 2, pp 2 on 8 ranks has dp 2."""
    layout = written_layout(config, role)
    return replace(layout, dp=len(role_ranks(config, role, world_size)) // ranks_of_replica(layout))


def role_ranks(config: Config, role: Role, world_size: int) -> tuple[int, ...]:
    """The ranks of a role, ascending."""
    return _ranks(written_ranks(config, role), world_size)


def generation_ranks(config: Config, world_size: int) -> tuple[int, ...]:
    """The ranks on which the actor generates, ascending."""
    return _ranks(written_generation_ranks(config), world_size)


def written_ranks(config: Config, role: Role) -> str | None:
    """A role's ranks as written."""
    return _written(vars(config.placement)[role.value])


def written_generation_ranks(config: Config) -> str | None:
    """The ranks on which the actor generates, as written for them or for the actor."""
    placement = config.placement
    return _written(placement.actor if placement.generation is None else placement.generation)


def parsed_ranks(text: str) -> tuple[int, ...] | None:
    """Ranks ascending, None where `text` does not name any in the form of the example, or one twice.

    Example: `parsed_ranks("5-7,0") == (0, 5, 6, 7)`.
    """
    parts = [re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part, re.ASCII) for part in text.split(",")]
    if not all(parts):
        return None
    ends = [(int(part[1]), int(part[2] or part[1])) for part in parts]
    if any(last < first or last >= MOST_RANKS for first, last in ends):
        return None
    ranks = [rank for first, last in ends for rank in range(first, last + 1)]
    return tuple(sorted(ranks)) if len(set(ranks)) == len(ranks) else None


def _written(ranks: int | str | None) -> str | None:
    return None if ranks is None else str(ranks)


def _ranks(text: str | None, world_size: int) -> tuple[int, ...]:
    """Those of a checked config; of one that is not, what there is of them."""
    ranks = range(world_size) if text is None else parsed_ranks(text) or ()
    return tuple(rank for rank in ranks if rank < world_size)


def ranks_of_replica(layout: LayoutConfig) -> int:
    """Ranks that share out one replica: tp x cp x pp."""
    return layout.tp * layout.cp * layout.pp


def token_multiple(layout: LayoutConfig) -> int:
    """What the tokens of a replica's micro-batch are padded to a multiple of: the same number on all its ranks."""
    return layout.cp * (layout.tp if layout.sequence_parallel else 1)


def generation_layout(config: Config, world_size: int) -> LayoutConfig:
    """The actor's layout while it generates: its own tp and pp, the rest replicas."""
    layout = written_generation_layout(config)
    return replace(layout, dp=len(generation_ranks(config, world_size)) // ranks_of_replica(layout))


def written_generation_layout(config: Config) -> LayoutConfig:
    """The same as written: dp is what is left."""
    layout = config.generation.layout
    return LayoutConfig(tp=layout.tp, pp=layout.pp, layers_per_stage=layout.layers_per_stage)


def divisors(number: int) -> list[int]:
    """Divisors in rising order. Example: 8 has 1, 2, 4, 8."""
    return [d for d in range(1, number + 1) if number % d == 0]
