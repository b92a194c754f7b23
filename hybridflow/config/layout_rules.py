"""What a layout must be to the world, to the pipeline schedule and to the layers of a new model. Pure.

`validate` asks it; the arithmetic of layouts is `layouts`', heads and other shapes are `shapes`'.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from hybridflow.config.command import Command
from hybridflow.config.faults import Fault, listed
from hybridflow.config.layouts import Role, divisors, layout_key, used_roles, written_layout
from hybridflow.config.model_schema import LayoutConfig, ModelSpec
from hybridflow.config.schema import Config
from hybridflow.config.words import ScheduleName

BLAMED = ("tp", "pp", "cp")  # for a world that cannot be cut, in this order


def layout_faults(config: Config, world_size: int, command: Command) -> Iterator[Fault]:
    """A fault for each layout that `command` uses and that this world or the model's layers cannot be cut in."""
    used = () if command is Command.GENERATE else used_roles(config, command)  # it has the generation layout alone
    written = {layout_key(config, role): written_layout(config, role) for role in used}
    spec = config.model.spec if config.model.path is None else None  # an export's file may have its run's start
    for key, layout in written.items():
        yield from _layout(key, layout, world_size, spec)
    if command is not Command.GENERATE:
        yield from _chunks(config, command)
    if command is Command.EXPORT:  # it generates nothing
        return
    tp = config.generation.layout.tp
    if tp < 1 or world_size % tp:
        yield Fault("generation.layout.tp", tp, f"world size {world_size} cannot be cut in tp {tp}",
                    f"choose tp {listed(divisors(world_size))}")


def _layout(key: str, layout: LayoutConfig, world_size: int, spec: ModelSpec | None) -> Iterator[Fault]:
    dp, within = layout.dp, _degrees(layout)
    if min(within.values()) < 1 or world_size % prod(within.values()):
        yield _no_cut(key, within, world_size)
    elif dp is not None and prod(within.values()) * dp != world_size:
        left = world_size // prod(within.values())
        yield Fault(f"{key}.dp", dp, f"{_written(within)} x dp {dp} is not the world size {world_size}",
                    f"choose dp {left}, or null")
    if layout.vpp < 1:
        yield Fault(f"{key}.vpp", layout.vpp, "must be at least 1", "choose 1 or more")
    elif layout.pp >= 1:
        yield from _layers(key, layout, spec)


def _layers(key: str, layout: LayoutConfig, spec: ModelSpec | None) -> Iterator[Fault]:
    """Every chunk of every stage has a layer, and every layer a chunk."""
    stages, chunks = layout.layers_per_stage, layout.pp * layout.vpp
    cut = f"{layout.pp} stages" + (f" x {layout.vpp} chunks" if layout.vpp > 1 else "")
    if stages is None:
        if spec is not None and spec.num_layers < chunks:
            yield Fault(f"{key}.pp", layout.pp, f"model.spec.num_layers {spec.num_layers} cannot fill {cut}",
                        f"choose pp {max(1, spec.num_layers // layout.vpp)} or less")
    elif len(stages) != chunks or min(stages) < 1:
        each = "each of the" if layout.vpp == 1 else "each chunk of"
        yield Fault(f"{key}.layers_per_stage", stages, f"must name a number of layers for {each} {cut}",
                    "choose null for an even cut")
    elif spec is not None and sum(stages) != spec.num_layers:
        yield Fault(f"{key}.layers_per_stage", stages,
                    f"adds up to {sum(stages)}, not to model.spec.num_layers {spec.num_layers}",
                    "choose null for an even cut")


def _no_cut(key: str, within: dict[str, int], world_size: int) -> Fault:
    """The world cannot be cut in tp x cp x pp: blame the degree that can be put right by itself."""
    rule = f"world size {world_size} cannot be cut in {_written(within)}"
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


def _chunks(config: Config, command: Command) -> Iterator[Fault]:
    """The schedule of those who learn says how many chunks a stage has; those who only score need one."""
    learning = {layout_key(config, role) for role in used_roles(config, command) if role in (Role.ACTOR, Role.CRITIC)}
    written = {layout_key(config, role): written_layout(config, role) for role in used_roles(config, command)}
    schedule = config.train.schedule
    for key, layout in written.items():
        if layout.pp == 1 and layout.vpp > 1:
            yield Fault(f"{key}.vpp", layout.vpp, "at pp 1 there is one stage alone, and nothing to fill with chunks",
                        "choose 1")
        elif layout.pp > 1 and layout.vpp >= 1 and key in learning:
            yield from _chunks_of_schedule(key, layout.vpp, schedule)
        elif layout.pp > 1 and layout.vpp > 1:
            yield Fault(f"{key}.vpp", layout.vpp, "who only scores has no schedule with chunks", "choose 1")


def _chunks_of_schedule(key: str, vpp: int, schedule: ScheduleName) -> Iterator[Fault]:
    if schedule is ScheduleName.INTERLEAVED:
        if vpp < 2:
            yield Fault(f"{key}.vpp", vpp, "train.schedule interleaved needs two chunks or more on each stage",
                        "choose 2 or more, or train.schedule 1f1b")
    elif schedule is ScheduleName.ZB_V:
        if vpp != 2:
            yield Fault(f"{key}.vpp", vpp, "train.schedule zb-v has two chunks on each stage, down and up again",
                        "choose 2")
    elif vpp > 1:
        yield Fault(f"{key}.vpp", vpp, f"train.schedule {schedule.value} has one chunk on each stage",
                    "choose 1, or train.schedule interleaved")
