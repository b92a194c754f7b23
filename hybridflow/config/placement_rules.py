"""What placements must be: ranks of the world, each with some work, and an engine that can do with them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config.faults import Fault, listed
from hybridflow.config.layouts import (
    Role,
    generation_ranks,
    parsed_ranks,
    role_ranks,
    roles,
    written_generation_ranks,
)
from hybridflow.config.schema import Config
from hybridflow.config.words import EngineName, GenerationWeights, Overlap


def placement_faults(config: Config, world_size: int) -> Iterator[Fault]:
    """A fault for each placement that this world does not have, or one for all ranks that no role has."""
    written = {name: str(ranks) for name, ranks in vars(config.placement).items() if ranks is not None}
    wrong = [fault for name, text in written.items() for fault in _ranks(f"placement.{name}", text, world_size)]
    yield from wrong
    if wrong:
        return
    used = set(generation_ranks(config, world_size))
    used.update(rank for role in roles(config) for rank in role_ranks(config, role, world_size))
    if idle := sorted(set(range(world_size)) - used):
        yield Fault("placement", "{...}", f"leaves ranks {listed(idle)} without any work",
                    "give them a role, or start fewer")
    yield from _generation(config, world_size)


def _ranks(key: str, text: str, world_size: int) -> Iterator[Fault]:
    ranks = parsed_ranks(text)
    if ranks is None:
        yield Fault(key, text, "is no list of different ranks", "write e.g. 0-3 or 0,2,5-7, or null for all")
    elif ranks[-1] >= world_size:
        yield Fault(key, text, f"the world has ranks 0 to {world_size - 1}",
                    f"choose ranks below {world_size}, or start {ranks[-1] + 1}")


def _generation(config: Config, world_size: int) -> Iterator[Fault]:
    """Who generates elsewhere has weights of its own."""
    generating = generation_ranks(config, world_size)
    apart = generating != role_ranks(config, Role.ACTOR, world_size)
    if apart and config.generation.weights is GenerationWeights.SHARED:
        yield Fault("generation.weights", "shared", "generates with training weights where they lie, and "
                    "placement.generation has other ranks than placement.actor", "choose packed or null")
    if apart and not config.generation.layout.within_node:
        yield Fault("generation.layout.within_node", False, "has no effect where generation has ranks of its own, "
                    "whose groups are as placement.generation lists them", "remove it, or placement.generation")
    roles_of = {role: set(role_ranks(config, role, world_size)) for role in roles(config)}
    shared = [role.value for role, ranks in roles_of.items() if ranks.intersection(generating)]
    if config.generation.overlap is not Overlap.NONE and shared:
        yield Fault("generation.overlap", config.generation.overlap.value, "needs ranks that only generate, and "
                    f"{listed(shared, 'and')} {'have' if len(shared) > 1 else 'has'} some of them too",
                    "place generation apart, e.g. placement.generation 2-3 and the roles on 0-1, or choose none")
    if config.generation.engine is EngineName.VLLM and config.generation.overlap is Overlap.PARTIAL:
        yield Fault("generation.overlap", "partial", "vllm cannot be interrupted",
                    "choose none or one_step_off, or generation.engine own")
    if config.generation.engine is EngineName.VLLM and len(generating) < world_size:
        yield Fault("placement.generation", written_generation_ranks(config),
                    "vllm generates on every rank", "choose null, or generation.engine own")
