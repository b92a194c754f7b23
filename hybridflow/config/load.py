"""From YAML and `key=value` overrides to a typed `Config`, and back.

Owns reading, types and unknown keys. What values may be together is `validate`'s. Every fault of a config is found
before the first is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridflow.config.faults import ConfigError, Fault, nearest_key, plain, require_none
from hybridflow.config.hints import block_of, described, field_types, is_list, members, words_of
from hybridflow.config.schema import Config

Tree = dict[str, Any]
Block = TypeVar("Block")
Source = str | Path | Mapping[str, Any]

BASE = "base"  # in a file: another one, whose keys it changes


@dataclass(frozen=True)
class UnknownWord(Fault):
    """A word that is none of those that its key may hold: `words`."""

    words: tuple[str, ...] = ()


def load_config(source: Source, overrides: Sequence[str] = ()) -> Config:
    """Read a config from a YAML file (or a nested mapping), with overrides such as "train.layout.tp=2" on top.

    Only names and types are checked here; `check.checked_config` checks everything.

    Raises:
        ConfigError: every unknown key and every wrong type.
    """
    tree, faults = read_tree(source, overrides)
    config, typing_faults = typed(tree)
    require_none(source_name(source), faults + typing_faults)
    return config


def read_tree(source: Source, overrides: Sequence[str]) -> tuple[Tree, list[Fault]]:
    """The keys that a file and the overrides name, interpolations resolved; nothing is typed yet.

    Raises:
        ConfigError: the file is missing or is not YAML, so that nothing else can be said about it.
    """
    tree = _from_mapping(source) if isinstance(source, Mapping) else _read_yaml(Path(source))
    faults = [fault for override in overrides if (fault := _apply(tree, override)) is not None]
    if "${" in OmegaConf.to_yaml(tree):
        faults += list(_resolve(tree, _with_defaults(tree), ""))
    return OmegaConf.to_container(tree), faults


def typed(tree: Tree) -> tuple[Config, list[Fault]]:
    """The `Config` of a plain tree, and what was wrong; a key that is wrong keeps its default."""
    faults: list[Fault] = []
    return _block(Config, tree, "", faults), faults


def with_value(tree: Tree, key: str, value: object) -> Tree:
    """A copy of a plain tree with another value of a dotted key."""
    changed = OmegaConf.create(tree)
    OmegaConf.update(changed, key, value, force_add=True)
    return OmegaConf.to_container(changed)


def to_tree(config: Config) -> Tree:
    """A config as plain dicts, lists and words, as YAML would hold it."""
    return plain(config)


def to_yaml(config: Config) -> str:
    """The whole config as YAML; reading it gives an equal config."""
    return OmegaConf.to_yaml(OmegaConf.create(to_tree(config)))


def source_name(source: Source) -> str:
    """What to call the config in a message: its path, where it has one."""
    return "config" if isinstance(source, Mapping) else str(source)


def known_keys(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, blocks included, in order."""
    for field, hint in field_types(cls).items():
        yield prefix + field
        if (block := block_of(hint)) is not None:
            yield from known_keys(block, f"{prefix}{field}.")


def _from_mapping(source: Mapping[str, Any]) -> DictConfig:
    try:
        return OmegaConf.create(_python(source))
    except OmegaConfBaseException as error:
        raise ConfigError("config", [Fault("config", "{...}", str(error).splitlines()[0])]) from error


def _python(value: Any) -> Any:
    """Python's own numbers in the place of numpy's, however deep."""
    if isinstance(value, Mapping):
        return {key: _python(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_python(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _read_yaml(path: Path, above: tuple[Path, ...] = ()) -> DictConfig:
    """A file's keys on top of those of its base. `above`: the files of which this one is a base."""
    if not path.is_file():
        rule = "is a folder" if path.is_dir() else "no such file"
        raise ConfigError(str(path), [Fault("config", path, rule, "give the path of a YAML file")])
    try:
        tree = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(str(path), [Fault("config", path, f"not YAML: {reason}")]) from error
    except OSError as error:  # of omegaconf too, without a number, for YAML that is a single value
        rule = f"cannot be read: {error.strerror}" if error.errno else "holds a single value, not keys"
        raise ConfigError(str(path), [Fault("config", path, rule)]) from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(str(path), [Fault("config", path, "holds a list, not keys")])
    base = tree.pop(BASE, None)
    if base is None:
        return tree
    files = (*above, path.resolve())
    if not isinstance(base, str) or (path.parent / base).resolve() in files:
        rule = "is a base of itself" if isinstance(base, str) else "is no path"
        raise ConfigError(str(path), [Fault(BASE, base, rule, "name another YAML file, relative to this one")])
    return OmegaConf.merge(_read_yaml(path.parent / base, files), tree)


def _apply(tree: DictConfig, override: str) -> Fault | None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        return Fault(override, text or None, "is not an override", "write key=value, e.g. train.seed=1")
    try:
        value = OmegaConf.from_dotlist([f"value={text}"]).value
        _bring_default_list(tree, key)
        OmegaConf.update(tree, key.strip(), value, force_add=True)
    except (yaml.YAMLError, OmegaConfBaseException, IndexError, ValueError, TypeError) as error:
        return Fault(key, text, f"cannot be set: {str(error).splitlines()[0]}")
    return None


def _bring_default_list(tree: DictConfig, key: str) -> None:
    """An override of one element, such as data.tasks[0].weight, changes the default list where the file has none."""
    head = re.split(r"\[|\.\d", key)[0].strip()
    if head == key or OmegaConf.select(tree, head) is not None:
        return
    default = OmegaConf.select(OmegaConf.create(to_tree(Config())), head)
    if isinstance(default, ListConfig):
        OmegaConf.update(tree, head, default, force_add=True)


def _with_defaults(tree: DictConfig) -> DictConfig:
    """The tree over the defaults, for interpolations to look in; the tree alone where its shape is wrong."""
    try:
        merged = OmegaConf.merge(OmegaConf.create(to_tree(Config())), tree)
    except (TypeError, OmegaConfBaseException):
        return tree
    assert isinstance(merged, DictConfig)
    return merged


def _resolve(tree: Any, merged: Any, prefix: str) -> Iterator[Fault]:
    """Put values in the place of interpolations such as ${train.seed}, which may name keys that have only a default."""
    names = list(tree.keys()) if isinstance(tree, DictConfig) else range(len(tree))
    for name in names:
        key = f"{prefix}{name}" if isinstance(tree, DictConfig) else f"{prefix[:-1]}[{name}]"
        if OmegaConf.is_interpolation(tree, name):
            written = OmegaConf.to_container(tree)[name]
            try:
                tree[name] = merged[name]
            except OmegaConfBaseException as error:
                tree[name] = None
                if isinstance(tree, DictConfig):
                    tree.pop(name)
                yield Fault(key, written, f"cannot be resolved: {str(error).splitlines()[0]}")
        elif OmegaConf.is_config(tree[name]):
            yield from _resolve(tree[name], merged[name], f"{key}.")


def _block(cls: type[Block], tree: Mapping[Any, Any], prefix: str, faults: list[Fault]) -> Block:
    """The dataclass `cls` with the entries of `tree` that fit it; what does not fit goes to `faults`."""
    hints, good = field_types(cls), {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in hints:
            faults.append(_unknown(key, value, hints))
            continue
        try:
            good[name] = _value(hints[name], value, key, faults)
        except (OmegaConfBaseException, ValueError):
            faults.append(_mistyped(key, value, hints[name]))
    return cls(**good)


def _value(hint: Any, value: object, key: str, faults: list[Fault]) -> Any:
    """A value of the type `hint`, made from what YAML has; faults inside a block are collected.

    Raises:
        ValueError, OmegaConfBaseException: it is of another type.
    """
    block, words = block_of(hint), words_of(hint)
    if value is None or (block is None and words is None):
        return _converted(hint, value)
    if words is not None:
        return _word(words, value)
    assert block is not None
    if not is_list(hint):
        if not isinstance(value, Mapping):
            raise ValueError(value)
        return _block(block, value, f"{key}.", faults)
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise ValueError(value)
    return [_block(block, item, f"{key}[{i}].", faults) for i, item in enumerate(value)]


def _converted(hint: Any, value: object) -> Any:
    """A plain value (or a list or dict of them), converted as an omegaconf structured config of this type does.

    Raises:
        ValueError, OmegaConfBaseException: it cannot be.
    """
    if bool in members(hint) and isinstance(value, Real) and not isinstance(value, bool):
        raise ValueError(value)  # omegaconf takes every number but 0 for true
    key = OmegaConf.structured(make_dataclass("Key", [("value", hint)]))
    return OmegaConf.to_container(OmegaConf.merge(key, {"value": value}))["value"]


def _word(words: type[Enum], value: object) -> Enum:
    """The Enum member that a word names. YAML reads a bare no or off as false; there it is the word again.

    Raises:
        ValueError: there is no such word.
    """
    names = {str(member.value): member for member in words}
    written = [str(value).lower()]
    if isinstance(value, bool):
        written = ["on", "yes"] if value else ["off", "no"]
    for word in written:
        if word in names:
            return names[word]
    raise ValueError(value)


def _unknown(key: str, value: object, block: Mapping[str, Any]) -> Fault:
    """A fault at the one key within an unknown block, where it has but one."""
    near, inner = nearest_key(key, block, known_keys()), ""
    while isinstance(value, Mapping) and len(value) == 1:
        ((name, value),) = value.items()
        inner += f".{name}"
    if near and near + inner in known_keys():
        near += inner
    choice = f"did you mean {near}?" if near else f"keys here: {', '.join(block)}"
    return Fault(key + inner, value, "unknown key", choice)


def _mistyped(key: str, value: object, hint: Any) -> Fault:
    rule, words = f"is not {described(hint)}", words_of(hint)
    if words is None:
        single = is_list(hint) and isinstance(value, (str, Real)) and value != ""
        return Fault(key, value, rule, f"write [{value}]" if single else "")
    known = tuple(str(member.value) for member in words)
    near = nearest_key(str(value).lower(), known, ())
    return UnknownWord(key, value, rule, f"did you mean {near}?" if near else "choose one of these", words=known)
