"""The command line of `hybridflow reshard`, read and checked: every fault of it at once, then a `Task`.

Owns the words of ranks, nodes and memory, and which keys of a config count here; layouts are `reshard_layouts`'.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import lcm, prod
from pathlib import Path
from typing import Any

import torch

from hybridflow.commands.reshard_layouts import Degrees, Which, placed, written_degrees
from hybridflow.config.command import Command
from hybridflow.config.faults import ConfigError, Fault, listed, require_none
from hybridflow.config.layout_rules import layout_faults
from hybridflow.config.layouts import divisors
from hybridflow.config.load import read_tree, typed
from hybridflow.config.schema import Config
from hybridflow.config.shapes import spec_decoder
from hybridflow.config.validate import validate
from hybridflow.models.config import ModelConfig
from hybridflow.models.safetensors_files import read_json_object
from hybridflow.parallel.nodes import ONE_NODE, Nodes
from hybridflow.reshard.move import MAX_RANKS, available_bytes, memory_bytes
from hybridflow.reshard.task import Task

MOST_RANKS = 1 << 19  # counted in about a minute; time grows with the ranks
TOO_SLOW = "larger worlds take minutes to count"
READ = ("model.path", "model.spec", "generation.reshard_bucket_mb")  # keys, or what they begin with
READ_OF_LAYOUT = ("train.layout", "train.schedule")


def checked(arguments: argparse.Namespace) -> Task:
    """What the command line asks for.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    faults: list[Fault] = []
    model, config = _model(arguments, faults)
    given = _given(arguments.overrides) if config is not None else frozenset()
    written = {side: written_degrees(arguments, side, config, given, faults) for side in Which}
    world = _count("--world", arguments.world, MOST_RANKS, faults, TOO_SLOW)
    named = {Which.TRAIN: _ranks("--from-ranks", arguments.from_ranks, faults),
             Which.GENERATE: _ranks("--to-ranks", arguments.to_ranks, faults)}
    bucket = _count("--bucket-mb", arguments.bucket_mb, 1 << 20, faults)
    if config is not None:
        faults += _contradicted(arguments, config, given, bucket)
    if world is None and arguments.world is None:
        world = _least_world(written, named)
        if world > MOST_RANKS:
            faults.append(Fault("--world", world, f"the layouts need more than {MOST_RANKS} ranks", TOO_SLOW))
            world = None
    nodes = _nodes(arguments, world, faults)
    sides = {side: placed(side, written[side], named[side], world, model, faults) for side in Which}
    require_none("reshard", faults)
    train, generate = sides[Which.TRAIN], sides[Which.GENERATE]
    assert model is not None and world is not None and nodes is not None
    assert train is not None and generate is not None
    default = config if config is not None else Config()
    task = Task(model, train, generate, world, nodes,
                default.generation.layout.within_node and not arguments.across_nodes,
                getattr(torch, arguments.dtype), (bucket or default.generation.reshard_bucket_mb) << 20)
    if arguments.run:
        require_none("reshard", _too_much(task))
    return task


def _model(arguments: argparse.Namespace, faults: list[Fault]) -> tuple[ModelConfig | None, Config | None]:
    """The model, and the config where a YAML file has it. None where there is none to be had."""
    path: Path = arguments.model
    if not path.exists():
        faults.append(Fault("--model", path, "no such file", "give the YAML file of a run, or a Hugging Face folder or "
                            "config.json"))
        return None, None
    if not (path.is_dir() or path.suffix == ".json"):
        try:
            return _model_of_run(path, arguments.overrides, arguments.train is None, faults)
        except ConfigError as error:
            faults += error.faults
            return None, None
    if arguments.overrides:
        faults.append(Fault("key=value", " ".join(arguments.overrides), f"{path} is no YAML file, which alone has keys",
                            "leave them out"))
    try:
        if path.is_dir():
            return ModelConfig.from_hf_folder(path), None
        return ModelConfig.from_hf_dict(read_json_object(path)), None
    except ValueError as error:
        faults.append(Fault("--model", path, str(error)))
        return None, None


def _model_of_run(path: Path, overrides: Sequence[str], reads_layout: bool,
                  faults: list[Fault]) -> tuple[ModelConfig | None, Config | None]:
    """Also finds what is wrong with all other keys that are read here; `reads_layout`: train.layout is among them.

    Raises:
        ConfigError: no such file, or no YAML.
    """
    tree, found = read_tree(path, overrides)
    config, typing_faults = typed(tree)
    found += typing_faults
    reported = {fault.key for fault in found}
    wrong = [fault for fault in validate(config, 1, Command.TRAIN) if fault.key.startswith(READ)]
    layout = config.train.layout
    ranks = [layout.tp, layout.cp, layout.pp, 1 if layout.dp is None else layout.dp]
    if reads_layout and min(*ranks, layout.vpp) >= 1:
        wrong += [fault for fault in layout_faults(config, prod(ranks), Command.SFT)
                  if fault.key.startswith(READ_OF_LAYOUT)]
    found += [fault for fault in wrong if fault.key not in reported]
    spec = config.model.spec
    if config.model.path is None and spec is not None and spec.vocab_size is None:
        found.append(Fault("model.spec.vocab_size", None, "only the tokenizer knows it, which is not read here",
                           "give model.spec.vocab_size=N on the command line"))
    faults += found
    if found:
        return None, config
    if config.model.path is None:
        assert spec is not None
        return spec_decoder(spec, 0), config
    try:
        return ModelConfig.from_hf_folder(config.model.path), config
    except ValueError as error:
        faults.append(Fault("model.path", config.model.path, str(error)))
        return None, config


def _given(overrides: Sequence[str]) -> frozenset[str]:
    """The dotted keys that the command line itself has."""
    def leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
        for name, value in tree.items():
            yield f"{prefix}{name}"
            if isinstance(value, Mapping):
                yield from leaves(value, f"{prefix}{name}.")

    return frozenset(leaves(read_tree({}, overrides)[0], ""))


def _contradicted(arguments: argparse.Namespace, config: Config, given: Collection[str],
                  bucket: int | None) -> list[Fault]:
    """Keys of the command line, beside an option that says otherwise. An option goes before the file."""
    faults = []
    mib, within = config.generation.reshard_bucket_mb, config.generation.layout.within_node
    if "generation.reshard_bucket_mb" in given and bucket not in (None, mib):
        faults.append(Fault("generation.reshard_bucket_mb", mib, f"--bucket-mb is {bucket}", "leave one of them out"))
    if "generation.layout.within_node" in given and within and arguments.across_nodes:
        faults.append(Fault("generation.layout.within_node", within, "--across-nodes is there too",
                            "leave one of them out"))
    return faults


def _count(option: str, text: str | None, most: int, faults: list[Fault], why: str = "") -> int | None:
    """`why`: no more than `most`."""
    if text is None:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= most:
        faults.append(Fault(option, text, f"is not a whole number from 1 to {most}", why))
        return None
    return int(text)


def _ranks(option: str, text: str | None, faults: list[Fault]) -> tuple[int, ...] | None:
    """Ranks such as 0-3,8; None where none or wrong ones are given."""
    if text is None:
        return None
    ranks: list[int] = []
    for word in text.split(","):
        lo, dash, hi = (part.strip() for part in word.partition("-"))
        ends = (lo, hi if dash else lo)
        if not all(end.isdecimal() for end in ends) or not int(ends[0]) <= int(ends[1]) < MOST_RANKS:
            faults.append(Fault(option, word, "is no rank or range of ranks", "write them as 0-3 or 0,2,4-7"))
            return None
        ranks += range(int(ends[0]), int(ends[1]) + 1)
    if len(set(ranks)) < len(ranks):
        faults.append(Fault(option, text, "names a rank twice", "name each rank once"))
        return None
    return tuple(ranks)


def _least_world(written: dict[Which, Degrees | None], named: dict[Which, tuple[int, ...] | None]) -> int:
    """As many ranks as are named; else the fewest on which both layouts fit."""
    if given := [max(ranks) + 1 for ranks in named.values() if ranks]:
        return max(given)
    exact = [layout.replica * layout.dp for layout in written.values() if layout is not None and layout.dp is not None]
    return max(exact) if exact else lcm(*(layout.replica for layout in written.values() if layout is not None))


def _nodes(arguments: argparse.Namespace, world: int | None, faults: list[Fault]) -> Nodes | None:
    per_node = _count("--ranks-per-node", arguments.ranks_per_node, MOST_RANKS, faults)
    count = _count("--nodes", arguments.nodes, MOST_RANKS, faults)
    if count is None:
        return ONE_NODE if per_node is None else Nodes(per_node)
    if world is not None and world % count:
        faults.append(Fault("--nodes", count, f"{world} ranks are not equally many in {count} nodes",
                            f"choose {listed(divisors(world))}"))
        return None
    return ONE_NODE if world is None else Nodes(world // count)


def _too_much(task: Task) -> list[Fault]:
    """What keeps a move from being tried on this host."""
    if task.world_size > MAX_RANKS:
        return [Fault("--run", task.world_size, f"more than {MAX_RANKS} processes on one host", "leave --run out")]
    needed, available = memory_bytes(task), available_bytes()
    if needed > available:
        return [Fault("--run", f"{needed / 1e9:.1f} GB", f"only {available / 1e9:.1f} GB of memory are available here",
                      "choose a smaller model or world, or leave --run out")]
    return []
