"""The command line of `hybridflow reshard`, read and checked: every fault of it at once, then a `Task`.

Owns the words of layouts and ranks. Degrees are checked against the ranks here and against the model by
`models.layout`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path

import torch

from hybridflow.config.command import Command
from hybridflow.config.faults import ConfigError, Fault, listed, require_none
from hybridflow.config.layouts import divisors
from hybridflow.config.load import read_tree, typed
from hybridflow.config.model_schema import LayoutConfig
from hybridflow.config.schema import Config
from hybridflow.config.shapes import spec_decoder
from hybridflow.config.validate import validate
from hybridflow.models.config import ModelConfig
from hybridflow.models.layout import check_layout
from hybridflow.models.safetensors_files import read_json_object
from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.nodes import ONE_NODE, Nodes
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.reshard.move import MAX_RANKS, free_bytes, memory_bytes
from hybridflow.reshard.task import Side, Task

NAMES = {"train": "--from", "generate": "--to"}
DEGREES = {"train": ("tp", "pp", "vpp", "dp", "cp"), "generate": ("tp", "pp", "vpp", "dp")}
MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Degrees:
    """A layout as it was written. Example: `Degrees(tp=4, pp=2)`; dp None: what is left."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int | None = None
    layers_per_chunk: tuple[int, ...] | None = None

    @property
    def replica(self) -> int:
        return self.tp * self.pp * self.cp

    def __str__(self) -> str:
        named = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "cp": self.cp, "dp": self.dp}
        return ",".join(f"{name}={degree}" for name, degree in named.items() if degree not in (None, 1))


def checked(arguments: argparse.Namespace) -> Task:
    """What the command line asks for.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    faults: list[Fault] = []
    model, config = _model(arguments, faults)
    written = {side: _degrees(arguments, side, config, faults) for side in NAMES}
    world = _count("--world", arguments.world, MOST_RANKS, faults)
    named = {side: _ranks(option, getattr(arguments, option[2:].replace("-", "_")), faults)
             for side, option in (("train", "--from-ranks"), ("generate", "--to-ranks"))}
    bucket = _count("--bucket-mb", arguments.bucket_mb, 1 << 20, faults)
    if world is None and arguments.world is None:
        world = _least_world(written, named)
        if world > MOST_RANKS:
            faults.append(Fault("--world", world, f"the layouts need more than {MOST_RANKS} ranks"))
            world = None
    nodes = _nodes(arguments, world, faults)
    sides = {side: _side(side, written[side], named[side], world, model, faults) for side in NAMES}
    require_none("reshard", faults)
    train, generate = sides["train"], sides["generate"]
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
    if not (path.is_dir() or path.suffix == ".json"):
        try:
            return _model_of_run(path, arguments.overrides, faults)
        except ConfigError as error:
            faults += error.faults
            return None, None
    if arguments.overrides:
        faults.append(Fault("key=value", " ".join(arguments.overrides), f"{path} is no YAML file, which alone has keys",
                            "leave them out"))
    try:
        return (ModelConfig.from_hf_folder(path) if path.is_dir() else _from_json(path)), None
    except ValueError as error:
        faults.append(Fault("--model", path, str(error)))
        return None, None


def _from_json(path: Path) -> ModelConfig:
    if not path.is_file():
        raise ValueError("no such file")
    return ModelConfig.from_hf_dict(read_json_object(path))


def _model_of_run(path: Path, overrides: Sequence[str],
                  faults: list[Fault]) -> tuple[ModelConfig | None, Config | None]:
    """Raises:
        ConfigError: no such file, or no YAML.
    """
    tree, found = read_tree(path, overrides)
    config, typing_faults = typed(tree)
    found += typing_faults
    reported = {fault.key for fault in found}
    found += [fault for fault in validate(config, 1, Command.TRAIN)
              if fault.key not in reported and fault.key.startswith(("model.path", "model.spec"))]
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


def _degrees(arguments: argparse.Namespace, side: str, config: Config | None, faults: list[Fault]) -> Degrees | None:
    """The layout of a side as it was written, None where it has a fault."""
    text: str | None = getattr(arguments, side)
    if text is not None:
        return _parsed(NAMES[side], text, DEGREES[side], faults)
    if config is None:
        if arguments.model.is_dir() or arguments.model.suffix == ".json":
            faults.append(Fault(NAMES[side], None, "a Hugging Face model has no layouts", "give one, such as tp=2"))
        return None
    layout = config.train.layout if side == "train" else LayoutConfig(tp=config.generation.layout.tp)
    named = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "cp": layout.cp, "dp": layout.dp}
    block = "train.layout" if side == "train" else "generation.layout"
    wrong = [Fault(f"{block}.{name}", degree, "a degree is a whole number from 1 on", f"write {name}=1 or more")
             for name, degree in named.items() if degree is not None and degree < 1]
    faults += wrong
    layers = None if layout.layers_per_stage is None else tuple(layout.layers_per_stage)
    return None if wrong else Degrees(**named, layers_per_chunk=layers)


def _parsed(option: str, text: str, names: tuple[str, ...], faults: list[Fault]) -> Degrees | None:
    degrees: dict[str, int] = {}
    before = len(faults)
    for word in text.split(","):
        name, equals, number = (part.strip() for part in word.partition("="))
        if not equals or name not in names:
            faults.append(Fault(option, word, "is no degree of a layout", f"write {listed(names)} with =N, such as "
                                "tp=4,pp=2"))
        elif name in degrees:
            faults.append(Fault(option, word, f"{name} is there twice", f"give {name} once"))
        elif not number.isdecimal() or int(number) < 1:
            faults.append(Fault(option, word, "a degree is a whole number from 1 on", f"write {name}=1 or more"))
        else:
            degrees[name] = int(number)
    return Degrees(**degrees) if len(faults) == before else None


def _count(option: str, text: str | None, most: int, faults: list[Fault]) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= most:
        faults.append(Fault(option, text, f"is not a whole number from 1 to {most}"))
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


def _least_world(written: dict[str, Degrees | None], named: dict[str, tuple[int, ...] | None]) -> int:
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


def _side(side: str, written: Degrees | None, named: tuple[int, ...] | None, world: int | None,
          model: ModelConfig | None, faults: list[Fault]) -> Side | None:
    """The side with its dp filled in, None where it fits neither ranks nor model."""
    if written is None or world is None:
        return None
    option = NAMES[side]
    ranks = tuple(range(world)) if named is None else named
    before = len(faults)
    if outside := [rank for rank in ranks if rank >= world]:
        faults.append(Fault(f"{option}-ranks", outside[0], f"there are {world} ranks, 0 to {world - 1}"))
    whose = f"{len(ranks)} ranks" if named is None else f"the {len(ranks)} ranks of {option}-ranks"
    if len(ranks) % written.replica:
        faults.append(Fault(option, written, f"{whose} cannot be cut in replicas of {written.replica}",
                            f"choose degrees whose product is {listed(divisors(len(ranks)))}"))
    elif written.dp is not None and written.replica * written.dp != len(ranks):
        faults.append(Fault(option, written, f"{whose} are not {written.dp} replicas of {written.replica}",
                            f"choose dp={len(ranks) // written.replica}, or leave dp out"))
    layout = Layout(written.tp, written.pp, max(1, len(ranks) // written.replica), written.cp)
    if model is not None:
        misfits = check_layout(model, layout, written.layers_per_chunk, Chunks(written.pp, written.vpp))
        faults += [Fault(option, written, f"the model cannot be cut so: {misfit}") for misfit in misfits]
    if len(faults) > before:
        return None
    return Side(layout, ranks, written.vpp, written.layers_per_chunk)


def _too_much(task: Task) -> list[Fault]:
    """What keeps a move from being tried on this host."""
    if task.world_size > MAX_RANKS:
        return [Fault("--run", task.world_size, f"more than {MAX_RANKS} processes on one host", "leave --run out")]
    needed, free = memory_bytes(task), free_bytes()
    if needed > free:
        return [Fault("--run", f"{needed / 1e9:.1f} GB", f"only {free / 1e9:.1f} GB of memory are free here",
                      "choose a smaller model or world, or leave --run out")]
    return []
