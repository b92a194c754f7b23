"""What a layout must be to the world, to the pipeline schedule and to the layers of a new model. Pure.

`validate` asks it; the arithmetic of layouts is `layouts`', heads and other shapes are `shapes`'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from hybridflow.config.batch_math import counted
from hybridflow.config.command import Command
from hybridflow.config.faults import Fault, listed
from hybridflow.config.layouts import (
    LEARNING,
    Role,
    divisors,
    layout_key,
    parsed_ranks,
    used_roles,
    written_generation_layout,
    written_generation_ranks,
    written_layout,
    written_ranks,
)
from hybridflow.config.model_schema import LayoutConfig, ModelSpec
from hybridflow.config.schema import Config
from hybridflow.config.words import Recompute, ScheduleName
from hybridflow.parallel.arithmetic import ceil_div

BLAMED = ("tp", "pp", "cp")  # for a world that cannot be cut, in this order


def layout_faults(config: Config, world_size: int, command: Command) -> Iterator[Fault]:
    """A fault for each layout that `command` uses and that this world or the model's layers cannot be cut in."""
    used = () if command.answers else used_roles(config, command)  # it has the generation layout alone
    written = {layout_key(config, role): written_layout(config, role) for role in used}
    learning = {layout_key(config, role) for role in used if role in LEARNING}
    spec = config.model.spec if config.model.path is None else None  # an export's file may have its run's start
    rooms: dict[tuple[str, int], Room] = {}
    for role in used:
        room = _room_of_role(config, role, world_size)
        rooms.setdefault((layout_key(config, role), room.size), room)
    for (key, _), room in rooms.items():
        yield from _degrees_of(room, key, written[key])
    for key, layout in written.items():
        yield from _chunks(key, layout, config.train.schedule if key in learning else None, spec)
    if command is Command.EXPORT:  # it generates nothing
        return
    generating = written_generation_layout(config)
    yield from _degrees_of(_room_of_generation(config, world_size), "generation.layout", generating)
    yield from _chunks("generation.layout", generating, None, spec)


def recompute_faults(config: Config, num_layers: Mapping[Role, int]) -> Iterator[Fault]:
    """Recomputation stops after a layer that a chunk has. `num_layers`: of the model of each role that learns."""
    asked = config.train.recompute_layers
    if asked is None or config.train.recompute is Recompute.NONE:
        return
    most = max(_most_layers(written_layout(config, role), count) for role, count in num_layers.items())
    if asked > most:
        yield Fault("train.recompute_layers", asked, f"no chunk has more than {counted(most, 'layer')}",
                    f"choose {listed(sorted({1, most}) if most < 3 else [f'1 to {most}'])}, or null for all")


def _most_layers(layout: LayoutConfig, num_layers: int) -> int:
    """Layers of the largest chunk."""
    return max(layout.layers_per_stage or [ceil_div(num_layers, layout.pp * layout.vpp)])


@dataclass(frozen=True)
class Room:
    """Ranks that a layout is laid over. Example: `str(Room("world size", 8)) == "world size 8"`."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name} {self.size}"


def _room_of_role(config: Config, role: Role, world_size: int) -> Room:
    return _room(f"placement.{role.value}", written_ranks(config, role), world_size)


def _room_of_generation(config: Config, world_size: int) -> Room:
    name = "actor" if config.placement.generation is None else "generation"
    return _room(f"placement.{name}", written_generation_ranks(config), world_size)


def _room(key: str, written: str | None, world_size: int) -> Room:
    """The world where nothing else is written; where that is wrong, and told by itself, as well."""
    ranks = None if written is None else parsed_ranks(written)
    if ranks is None or ranks[-1] >= world_size:
        return Room("world size", world_size)
    return Room(f"the number of ranks of {key},", len(ranks))


def _degrees_of(room: Room, key: str, layout: LayoutConfig) -> Iterator[Fault]:
    dp, within = layout.dp, _degrees(layout)
    if min(within.values()) < 1 or room.size % prod(within.values()):
        yield _no_cut(key, within, room)
    elif dp is not None and prod(within.values()) * dp != room.size:
        left = room.size // prod(within.values())
        the = "the " if room.name == "world size" else ""
        yield Fault(f"{key}.dp", dp, f"{_written(within)} x dp {dp} is not {the}{room}", f"choose dp {left}, or null")


def _no_cut(key: str, within: dict[str, int], room: Room) -> Fault:
    """The ranks cannot be cut in tp x cp x pp: blame the degree that can be put right by itself."""
    world_size = room.size
    rule = f"{room} cannot be cut in {_written(within)}"
    for name in BLAMED:
        others = prod(degree for other, degree in within.items() if other != name)
        valid = [d for d in divisors(world_size) if others >= 1 and world_size % (d * others) == 0]
        if valid and name in within:
            return Fault(f"{key}.{name}", within[name], rule, f"choose {name} {listed(valid)}")
    return Fault(f"{key}.tp", within["tp"], rule,
                 f"choose {listed(within, 'and')} whose product is {listed(divisors(world_size))}")


def _degrees(layout: LayoutConfig) -> dict[str, int]:
    """The degrees inside a replica; that of the context only where it is cut."""
    return {"tp": layout.tp, **({"cp": layout.cp} if layout.cp != 1 else {}), "pp": layout.pp}


def _written(within: dict[str, int]) -> str:
    return " x ".join(f"{name} {degree}" for name, degree in within.items())


def _chunks(key: str, layout: LayoutConfig, schedule: ScheduleName | None, spec: ModelSpec | None) -> Iterator[Fault]:
    """The schedule of those who learn says how many chunks a stage has; those who only score (None) need one. Each
    chunk has a layer, and each layer a chunk. One fault at most, whose choice is right for schedule and layers.
    """
    pp, vpp = layout.pp, layout.vpp
    if vpp < 1:
        yield Fault(f"{key}.vpp", vpp, "must be at least 1", "choose 1 or more")
    if vpp < 1 or pp < 1:
        return
    known = spec is not None and spec.num_layers >= 1 and layout.layers_per_stage is None
    num_layers = spec.num_layers if spec is not None and known else None
    if num_layers is not None and num_layers < pp * _fewest(pp, schedule):
        yield _no_pipeline(key, layout, schedule, num_layers)
    else:
        wrong = list(_chunks_of_schedule(key, layout, schedule, num_layers))
        yield from wrong or _layers(key, layout, spec)


def _fewest(pp: int, schedule: ScheduleName | None) -> int:
    """The fewest chunks on a stage that the schedule can have."""
    return 2 if pp > 1 and schedule in (ScheduleName.INTERLEAVED, ScheduleName.ZB_V) else 1


def _no_pipeline(key: str, layout: LayoutConfig, schedule: ScheduleName | None, num_layers: int) -> Fault:
    """The layers are too few for any number of chunks that the schedule can have at this pp."""
    pp, fewest = layout.pp, _fewest(layout.pp, schedule)
    chunks = f" x {fewest} chunks of train.schedule {schedule.value}" if schedule and fewest > 1 else ""
    plain = f"train.schedule 1f1b with vpp 1{'' if pp <= num_layers else f' and pp {num_layers} or less'}"
    choices = [plain] if fewest > 1 else []
    if (stages := num_layers // fewest) > 1 or fewest == 1:
        choices.insert(0, f"pp {stages} or less" + (f" with vpp {fewest}" if layout.vpp != fewest else ""))
    return Fault(f"{key}.pp", pp, f"model.spec.num_layers {num_layers} cannot fill {pp} stages{chunks}",
                 f"choose {', or '.join(choices)}")


def _chunks_of_schedule(key: str, layout: LayoutConfig, schedule: ScheduleName | None,
                        num_layers: int | None) -> Iterator[Fault]:
    place, vpp = f"{key}.vpp", layout.vpp
    most = None if num_layers is None else num_layers // layout.pp
    if layout.pp == 1 and vpp > 1:
        yield Fault(place, vpp, "at pp 1 there is one stage alone, and nothing to fill with chunks", "choose vpp 1")
    elif layout.pp == 1:
        return
    elif schedule is ScheduleName.INTERLEAVED:
        if vpp < 2:
            choice = "2 or more" if most is None else "2" if most == 2 else f"2 to {most}"
            yield Fault(place, vpp, "train.schedule interleaved needs two chunks or more on each stage",
                        f"choose vpp {choice}, or train.schedule 1f1b")
        elif most is not None and vpp > most:
            yield Fault(place, vpp, f"model.spec.num_layers {num_layers} cannot fill {layout.pp} stages x {vpp} chunks",
                        f"choose vpp {'2' if most == 2 else f'2 to {most}'}")
    elif schedule is ScheduleName.ZB_V and vpp != 2:
        yield Fault(place, vpp, "train.schedule zb-v has two chunks on each stage, down and up again", "choose vpp 2")
    elif schedule is None and vpp > 1:
        yield Fault(place, vpp, "who only scores has no schedule with chunks", "choose vpp 1")
    elif schedule not in (None, ScheduleName.ZB_V) and vpp > 1:  # told of the schedule, which may itself be misspelt
        yield Fault("train.schedule", schedule.value, f"has one chunk on each stage, but {place} is {vpp}",
                    "choose interleaved, or vpp 1" if most is None or vpp <= most else "choose vpp 1")


def _layers(key: str, layout: LayoutConfig, spec: ModelSpec | None) -> Iterator[Fault]:
    """What layers_per_stage must be."""
    stages, chunks = layout.layers_per_stage, layout.pp * layout.vpp
    if stages is None:
        return
    cut = f"{layout.pp} stages" + (f" x {layout.vpp} chunks" if layout.vpp > 1 else "")
    if len(stages) != chunks or min(stages) < 1:
        each = "each of the" if layout.vpp == 1 else "each chunk of"
        yield Fault(f"{key}.layers_per_stage", stages, f"must name a number of layers for {each} {cut}",
                    "choose null for an even cut")
    elif spec is not None and sum(stages) != spec.num_layers:
        yield Fault(f"{key}.layers_per_stage", stages,
                    f"adds up to {sum(stages)}, not to model.spec.num_layers {spec.num_layers}",
                    "choose null for an even cut")
