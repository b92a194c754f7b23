"""The two layouts of `hybridflow reshard`: from options or keys of a config to degrees, and to a `Side` on its ranks.

Degrees are checked against the ranks here and against the model by `models.layout`. It reads no file.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum

from hybridflow.config.faults import Fault, listed
from hybridflow.config.layouts import divisors, written_generation_layout
from hybridflow.config.model_schema import LayoutConfig
from hybridflow.config.schema import Config
from hybridflow.config.words import ScheduleName
from hybridflow.models.config import ModelConfig
from hybridflow.models.layout import check_layout
from hybridflow.parallel.mesh import Layout
from hybridflow.parallel.schedules.chunks import ChunkOrder, Chunks
from hybridflow.reshard.task import Side


class Which(Enum):
    """A side of the move. The value is its option."""

    TRAIN = "--from"
    GENERATE = "--to"

    @property
    def block(self) -> str:
        """The block of a config with its keys."""
        return "train.layout" if self is Which.TRAIN else "generation.layout"

    @property
    def degrees(self) -> tuple[str, ...]:
        """Those that its option can give."""
        return ("tp", "pp", "vpp", "dp", "cp") if self is Which.TRAIN else ("tp", "pp", "vpp", "dp")

    @property
    def keys(self) -> tuple[str, ...]:
        """Those that its block can give."""
        return self.degrees if self is Which.TRAIN else ("tp", "pp")


@dataclass(frozen=True)
class Degrees:
    """A layout as it was written. Example: `str(Degrees("--from", tp=4, pp=2)) == "tp=4,pp=2"`.

    Attributes:
        written_in: the option or block of keys.
        dp: None: what is left.
        schedule: says in which order chunks are dealt out.
    """

    written_in: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int | None = None
    layers_per_chunk: tuple[int, ...] | None = None
    schedule: ScheduleName = ScheduleName.ONE_F_ONE_B

    @property
    def replica(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def named(self) -> dict[str, int | None]:
        return {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "cp": self.cp, "dp": self.dp}

    @property
    def order(self) -> ChunkOrder:
        """Of the chunks, as the engine has it: where there is one on each stage, any schedule is right."""
        is_v = self.schedule is ScheduleName.ZB_V and self.pp > 1 and self.vpp == 2
        return ChunkOrder.V if is_v else ChunkOrder.LOOP

    def __str__(self) -> str:
        return ",".join(f"{name}={degree}" for name, degree in self.named.items() if degree not in (None, 1)) or "tp=1"


def written_degrees(arguments: argparse.Namespace, which: Which, config: Config | None, given: Collection[str],
                    faults: list[Fault]) -> Degrees | None:
    """The layout of a side: that of its option, with what only a config can say; else the config's. None where it has
    a fault.

    Args:
        given: the keys that the command line itself has. They must not say other than the option.
    """
    text: str | None = arguments.train if which is Which.TRAIN else arguments.generate
    if text is not None:
        degrees = parsed(which, text, faults)
        return degrees if degrees is None or config is None else _completed(which, degrees, config, given, faults)
    if config is None:
        if arguments.model.is_dir() or arguments.model.suffix == ".json":
            faults.append(Fault(which.value, None, "a Hugging Face model has no layouts", "give one, such as tp=2"))
        return None
    layout = _of_config(which, config)
    degrees = Degrees(which.block, layout.tp, layout.pp, layout.vpp, layout.cp, layout.dp)
    wrong = [_no_degree(f"{which.block}.{name}", name, degree)
             for name, degree in degrees.named.items() if degree is not None and degree < 1]
    faults += wrong
    return None if wrong else _with_chunks(which, degrees, config)


def _of_config(which: Which, config: Config) -> LayoutConfig:
    return config.train.layout if which is Which.TRAIN else written_generation_layout(config)


def _with_chunks(which: Which, degrees: Degrees, config: Config) -> Degrees:
    """With the layers and, of training, the order of chunks, which only the config of a run has."""
    layers = _of_config(which, config).layers_per_stage
    degrees = replace(degrees, layers_per_chunk=None if layers is None else tuple(layers))
    return degrees if which is Which.GENERATE else replace(degrees, schedule=config.train.schedule)


def _completed(which: Which, degrees: Degrees, config: Config, given: Collection[str],
               faults: list[Fault]) -> Degrees | None:
    """An option's degrees beside keys of a config: of the file's, those that the option cannot give count."""
    before, layout = len(faults), _of_config(which, config)
    of_keys = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "cp": layout.cp, "dp": layout.dp}
    for name in which.keys:
        key, degree, own = f"{which.block}.{name}", of_keys[name], degrees.named[name]
        if key not in given or degree is None or degree == own:
            continue
        if degree < 1:
            faults.append(_no_degree(key, name, degree))
        elif own is None:  # of dp alone
            degrees = replace(degrees, dp=degree)
        else:
            faults.append(Fault(key, degree, f"{which.value} {degrees} has {name} {own}",
                                f"write {name}={degree} there, or leave the key out"))
    degrees = _with_chunks(which, degrees, config)
    faults += _of_schedule(degrees, "train.schedule" in given)
    return degrees if len(faults) == before else None


def _of_schedule(degrees: Degrees, asked: bool) -> list[Fault]:
    """What the schedule of the config says against an option's chunks. `asked`: for on the command line; a file's
    schedule for one chunk on each stage counts for nothing where more are asked for.
    """
    schedule, text = degrees.schedule, f"{degrees.written_in} {degrees} has {degrees.vpp}"
    if degrees.pp == 1:
        return []
    if schedule is ScheduleName.ZB_V and degrees.vpp != 2:
        return [Fault("train.schedule", schedule.value, f"has two chunks on each stage, and {text}",
                      "write vpp=2 there, or train.schedule=1f1b")]
    if asked and degrees.vpp > 1 and schedule not in (ScheduleName.ZB_V, ScheduleName.INTERLEAVED):
        return [Fault("train.schedule", schedule.value, f"has one chunk on each stage, and {text}",
                      "write train.schedule=interleaved, or leave vpp out")]
    return []


def parsed(which: Which, text: str, faults: list[Fault]) -> Degrees | None:
    """Degrees such as tp=4,pp=2; None where there are faults."""
    option, names = which.value, which.degrees
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
            faults.append(_no_degree(option, name, word))
        else:
            degrees[name] = int(number)
    return Degrees(option, **degrees) if len(faults) == before else None


def _no_degree(key: str, name: str, value: object) -> Fault:
    return Fault(key, value, "a degree is a whole number from 1 on", f"write {name}=1 or more")


def placed(which: Which, written: Degrees | None, named: tuple[int, ...] | None, world: int | None,
           model: ModelConfig | None, faults: list[Fault]) -> Side | None:
    """The side with its dp filled in, None where it fits neither ranks nor model."""
    if written is None or world is None:
        return None
    ranks = tuple(range(world)) if named is None else named
    before = len(faults)
    if outside := [rank for rank in ranks if rank >= world]:
        faults.append(Fault(f"{which.value}-ranks", outside[0], f"there are {world} ranks, 0 to {world - 1}"))
    whose = f"{len(ranks)} ranks" if named is None else f"the {len(ranks)} ranks of {which.value}-ranks"
    where, text = written.written_in, str(written)
    if len(ranks) % written.replica:
        faults.append(Fault(where, text, f"{whose} cannot be cut in replicas of {written.replica}",
                            f"choose degrees whose product is {listed(divisors(len(ranks)))}"))
    elif written.dp is not None and written.replica * written.dp != len(ranks):
        faults.append(Fault(where, text, f"{whose} are not {written.dp} replicas of {written.replica}",
                            f"choose dp={len(ranks) // written.replica}, or leave dp out"))
    layout = Layout(written.tp, written.pp, max(1, len(ranks) // written.replica), written.cp)
    if model is not None:
        faults += _misfits(f"{which.block}.layers_per_stage", written, layout, model)
    if len(faults) > before:
        return None
    return Side(layout, ranks, written.vpp, written.layers_per_chunk, written.order)


def _misfits(layers_key: str, written: Degrees, layout: Layout, model: ModelConfig) -> list[Fault]:
    """What the model cannot be cut in."""
    chunks, layers, faults = Chunks(written.pp, written.vpp, written.order), written.layers_per_chunk, []
    if layers is not None and len(layers) != chunks.count:
        rule = f"{written.written_in} {written} has {chunks.count} chunks of layers"
        faults.append(Fault(layers_key, list(layers), rule,
                            f"give {chunks.count} numbers, or {layers_key}=null for an even cut"))
        layers = None
    return faults + [Fault(written.written_in, str(written), f"the model cannot be cut so: {misfit}")
                     for misfit in check_layout(model, layout, layers, chunks)]
