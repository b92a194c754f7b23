"""The one door through which a config comes: read, typed and checked in every way, or refused with every fault.

Owns the order of the checks and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hybridflow.config.command import Command
from hybridflow.config.faults import Fault, is_within, require_none
from hybridflow.config.files import missing_files
from hybridflow.config.load import Source, Tree, UnknownWord, read_tree, source_name, typed, with_value
from hybridflow.config.model_schema import PlacementConfig
from hybridflow.config.schema import Config
from hybridflow.config.shapes import shape_faults
from hybridflow.config.unread import unread_keys
from hybridflow.config.validate import validate


def checked_config(source: Source, overrides: Sequence[str], world_size: int, command: Command) -> Config:
    """The config of `command` on `world_size` ranks, free of every fault that can be known before the start.

    Raises:
        ConfigError: unknown keys, wrong types, values that do not go together, and missing files, all in one; then,
            of a config that has none of these, layouts in which the models cannot be cut.
    """
    tree, faults = read_tree(source, overrides)
    named = read_tree({}, overrides)[0]
    if command.answers or command is Command.EXPORT:
        faults += _overridden(named, unread_keys(typed(tree)[0], command))
    if command is Command.EXPORT and world_size == 1 and not _names("train.layout", named):
        _drop_layout(tree)
    return checked_tree(source_name(source), tree, faults, world_size, command)


def checked_tree(name: str, tree: Tree, faults: list[Fault], world_size: int, command: Command) -> Config:
    """The config of a plain tree, in the reading of which `faults` were found.

    Raises:
        ConfigError: as `checked_config`.
    """
    config, typing_faults = _typed(tree, command)
    found = faults + typing_faults
    of_values = value_faults(config, world_size, command)
    for fault in typing_faults:
        if isinstance(fault, UnknownWord):  # what goes with only some of the words may go with the one that was meant
            of_values = _whichever(fault, of_values, tree, world_size, command)
    reported = [fault.key for fault in found]
    found += [fault for fault in of_values
              if not any(is_within(fault.key, key) or is_within(key, fault.key) for key in reported)]
    require_none(name, found or shape_faults(config, world_size, command))
    return config


def _typed(tree: Tree, command: Command) -> tuple[Config, list[Fault]]:
    config, faults = typed(tree)
    if command.answers or command is Command.EXPORT:  # of a run whose roles were placed; these have all ranks
        config = replace(config, placement=PlacementConfig())
    return config, faults


def _whichever(unknown: UnknownWord, faults: list[Fault], tree: Tree, world_size: int,
               command: Command) -> list[Fault]:
    """Those of `faults` whose keys are wrong whichever word was meant."""
    for word in unknown.words:
        wrong = {fault.key for fault in
                 value_faults(_typed(with_value(tree, unknown.key, word), command)[0], world_size, command)}
        faults = [fault for fault in faults if fault.key in wrong]
    return faults


def _overridden(named: Tree, faults: Iterable[Fault]) -> list[Fault]:
    """The faults of keys that the overrides name, by themselves or within a block."""
    return [fault for fault in faults if _names(fault.key, named)]


def _names(key: str, tree: object) -> bool:
    """Whether a tree has a dotted key, or a value in the place of a block around it."""
    name, _, inner = key.partition(".")
    if not isinstance(tree, Mapping):
        return True
    return name in tree and (not inner or _names(inner, tree[name]))


def _drop_layout(tree: Tree) -> None:
    """One process exports a model whole, whatever ranks its training was cut over."""
    if isinstance(train := tree.get("train"), dict):
        train.pop("layout", None)


def require_valid(name: str, config: Config, world_size: int, command: Command) -> None:
    """Check a config that was made in Python.

    Raises:
        ConfigError: as `checked_config`.
    """
    require_none(name, value_faults(config, world_size, command) or shape_faults(config, world_size, command))


def value_faults(config: Config, world_size: int, command: Command) -> list[Fault]:
    """Values that do not go together, and missing files of keys that are not wrong by themselves."""
    found = validate(config, world_size, command)
    wrong = [fault.key for fault in found]
    return [*found, *(fault for fault in missing_files(config, command)
                      if not any(is_within(fault.key, key) for key in wrong))]
