"""Whatever `init_trainer` is given as its config, as a checked `Config` with notes on how it was read.

Owns telling the forms apart: a `Config`, a path, a dict in our keys, the dict of the seed article (`article`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridflow.config.article import article_key, is_article, translate
from hybridflow.config.check import checked_tree, require_valid
from hybridflow.config.command import Command
from hybridflow.config.faults import ConfigError, Fault, require_none, shown
from hybridflow.config.idle import idle_keys
from hybridflow.config.load import Source, Tree, read_tree, source_name, typed
from hybridflow.config.schema import Config
from hybridflow.config.unread import unread_keys


@dataclass(frozen=True)
class Reading:
    """A config, and a sentence for the log on each thing that was not simply taken over.

    Example: `Reading(config, ("train.fsdp true is not honoured: ...",))`.
    """

    config: Config
    notes: tuple[str, ...] = ()


def read_any(source: Config | Source, world_size: int, algorithm: str | None = None,
             command: Command = Command.API) -> Reading:
    """Read and check a config in any form.

    Args:
        world_size: ranks of the job.
        algorithm: "ppo" or "grpo" where the caller names it beside the config; it must not contradict the config.

    Raises:
        ConfigError: every fault of the config, as `check.checked_config`.
    """
    if isinstance(source, Config):
        require_none("config", _contradiction(algorithm, source.algorithm.name.value))
        require_valid("config", source, world_size, command)
        return Reading(source)
    if not isinstance(source, (Mapping, str, Path)):
        raise ConfigError("config", [Fault("config", source, f"is a {type(source).__name__}",
                                           "give a dict, the path of a YAML file, or a Config")])
    if isinstance(source, Mapping) and is_article(source):
        return _read_article(source, world_size, algorithm, command)
    tree, faults = read_tree(source, ())
    faults += _name_algorithm(tree, algorithm)
    # A file may have been written for the command line; a dict was written for this call.
    notes = [] if isinstance(source, Mapping) else _leave_out(tree, unread_keys(typed(tree)[0], command))
    return Reading(checked_tree(source_name(source), tree, faults, world_size, command), tuple(notes))


def _read_article(article: Mapping[str, Any], world_size: int, algorithm: str | None, command: Command) -> Reading:
    """The article's dict; faults are reported under the article's own keys."""
    translated, faults, notes = translate(article, world_size)
    tree, reading_faults = read_tree(translated, ())
    faults += reading_faults + _name_algorithm(tree, algorithm)
    config = typed(tree)[0]
    notes += _leave_out(tree, [*unread_keys(config, command), *idle_keys(config)])
    try:
        return Reading(checked_tree("config", tree, faults, world_size, command), tuple(notes))
    except ConfigError as error:
        renamed = {str(fault): replace(fault, key=article_key(fault.key)) for fault in error.faults}
        raise ConfigError("config (the article's form)", renamed.values()) from None


def _leave_out(tree: Tree, faults: Iterable[Fault]) -> list[str]:
    """Take the keys of `faults`, which have no effect, out of the tree; a note for each."""
    notes = {}
    for fault in faults:
        *blocks, name = fault.key.split(".")
        block = tree
        for outer in blocks:
            block = block.get(outer, {})
        if name in block:
            del block[name]
            notes[fault.key] = f"{article_key(fault.key)} {shown(fault.value)} {fault.rule}"
    return list(notes.values())


def _name_algorithm(tree: Tree, algorithm: str | None) -> list[Fault]:
    """Write `algorithm` into the tree where it names none."""
    block = tree.setdefault("algorithm", {})
    if algorithm is None or not isinstance(block, dict):
        return []
    return _contradiction(algorithm, str(block.setdefault("name", algorithm)).lower())


def _contradiction(algorithm: str | None, named: str) -> list[Fault]:
    if algorithm is None or algorithm.lower() == named:
        return []
    return [Fault("algorithm.name", named, f"but init_trainer was called with algorithm={algorithm!r}",
                  "name the same one in both, or leave one out")]
