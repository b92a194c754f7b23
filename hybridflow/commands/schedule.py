"""`hybridflow schedule`: what the pipeline schedule of a config will do, simulated, compared and drawn.

Needs neither the other ranks nor the files that a run reads, so that a cluster's job can be planned on a laptop. Owns
the options of this command and the numbers that it starts from; `schedule_report` does the rest.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from math import inf, lcm
from pathlib import Path

from hybridflow.config.batch_math import BatchMath
from hybridflow.config.command import Command
from hybridflow.config.faults import require_none
from hybridflow.config.layouts import (
    parsed_ranks,
    ranks_of_replica,
    token_multiple,
    used_roles,
    written_generation_layout,
    written_generation_ranks,
    written_layout,
    written_ranks,
)
from hybridflow.config.load import read_tree, typed
from hybridflow.config.preference_schema import PreferenceConfig
from hybridflow.config.schema import Config, SftConfig
from hybridflow.config.unread import unread_keys
from hybridflow.config.validate import validate
from hybridflow.parallel.arithmetic import ceil_div, round_up
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.schedules.chunks import Chunks

HELP = "simulate, compare and draw the pipeline schedule of a config"
EPILOGUE = """\
a schedule in numbers:    python -m hybridflow schedule configs/ppo_7b.yaml
draw another one:         ... --draw out.svg train.schedule=zb-h1 train.layout.pp=4
with measured costs:      ... --costs 10,10,8 --micro-batches 16
and a link of 25 GB/s:    ... --costs 10,10,8,0.02,25
beside a traced run:      python -m hybridflow schedule runs/x/config.yaml --trace runs/x/trace.json --draw out.png
"""
EXIT_FAULT = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file of a training run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys that differ from the file")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw the schedule as .svg or .png")
    parser.add_argument("--text", action="store_true", help="print the schedule, a line for each stage")
    parser.add_argument("--world", type=_count, metavar="N",
                        help="ranks of the run; else as few as the layouts need (dp 1 where it is null)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--micro-batches", type=_count, metavar="M",
                      help="micro-batches of one replica in one update; else as the config has it")
    size.add_argument("--trace", type=Path, metavar="FILE",
                      help="trace.json of a run of this config: draws the actor's update with the most micro-batches\n"
                           "(the last of them) below the simulated one, which takes its costs, the ranks and the\n"
                           "number of micro-batches from there; its costs not if --costs are given")
    parser.add_argument("--costs", type=_costs, metavar="F,B,W[,LATENCY[,GB/s]]",
                        help="milliseconds that one micro-batch takes in a stage: forward, backward, gradients of\n"
                             "matrices; milliseconds that any message takes on a link, and what the link carries,\n"
                             "which adds the time of a message's bytes. Without it F, B and W count 1 each")


def run(arguments: argparse.Namespace) -> int:
    """Report on the schedule of a config. Returns 0, or 2 for faults, which are printed."""
    try:
        plan = Plan.of(arguments)
        from hybridflow.commands.schedule_report import report  # brings matplotlib, which faults must not wait for

        print(report(plan, arguments.costs, arguments.trace, arguments.draw, with_text=arguments.text))
    except ValueError as error:  # of the config, the trace, or the name of the picture
        print(error, file=sys.stderr, flush=True)
        return EXIT_FAULT
    return 0


@dataclass(frozen=True)
class GivenCosts:
    """What --costs says. Example: `GivenCosts(0.010, 0.010, 0.008, latency=2e-5, bytes_per_second=25e9)`.

    Attributes:
        forward, backward, weight: seconds that one micro-batch takes in a whole stage.
        latency: seconds that any message takes on a link.
        bytes_per_second: what a link carries; inf: the bytes of a message take no time.
    """

    forward: float
    backward: float
    weight: float
    latency: float = 0.0
    bytes_per_second: float = inf


@dataclass(frozen=True)
class Plan:
    """What is to be simulated. Example: `Plan.of(arguments).schedule.num_micro_batches == 8`.

    Attributes:
        num_micro_batches: of one replica in one update.
        at_most: whether their number was worked out from the longest rows, and may be lower.
        world_given: whether the number of ranks was given, by --world or train.layout.dp; else it is the least.
    """

    config: Config
    world_size: int
    kind: ScheduleKind
    chunks: Chunks
    num_micro_batches: int
    at_most: bool
    world_given: bool = False

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Plan:
        """Check the config, and derive the numbers.

        Raises:
            ConfigError: what is wrong with the config as it stands, whatever files it names.
        """
        config, world_size = _checked(arguments)
        kind, layout = ScheduleKind(config.train.schedule.value), config.train.layout
        exact = BatchMath.of(config, world_size).micro_batches if arguments.micro_batches is None \
            else arguments.micro_batches
        return cls(config, world_size, kind, kind.chunks(layout.pp, layout.vpp),
                   exact or _most_micro_batches(config, world_size), exact is None,
                   arguments.world is not None or layout.dp is not None)


def _checked(arguments: argparse.Namespace) -> tuple[Config, int]:
    """The config, and the number of ranks: every check of a training run but those of files and models."""
    tree, faults = read_tree(arguments.config, arguments.overrides)
    config, typing_faults = typed(tree)
    command = _written_for(config)
    world_size = _least_world(config, command) if arguments.world is None else arguments.world
    found = faults + typing_faults
    reported = {fault.key for fault in found}
    require_none(arguments.config,
                 [*found, *(fault for fault in validate(config, world_size, command) if fault.key not in reported)])
    return config, world_size


def _written_for(config: Config) -> Command:
    """The command that a config's blocks speak of; of preference training the first that reads all of its keys."""
    if config.preference != PreferenceConfig():
        readers = (Command.DPO, Command.KTO, Command.REWARD_MODEL)
        return next((command for command in readers if not list(unread_keys(config, command))), Command.DPO)
    return Command.TRAIN if config.sft == SftConfig() else Command.SFT


def _least_world(config: Config, command: Command) -> int:
    """The fewest ranks that all placements name and all layouts without one fit on; exactly those of train.layout where
    it gives dp.
    """
    train = config.train.layout
    if train.dp is not None and config.placement.actor is None:
        return max(1, ranks_of_replica(train) * train.dp)
    replicas = [ranks_of_replica(written_layout(config, role)) for role in used_roles(config, command)
                if written_ranks(config, role) is None]
    if written_generation_ranks(config) is None:
        replicas.append(ranks_of_replica(written_generation_layout(config)))
    named = [ranks[-1] + 1 for text in vars(config.placement).values()
             if text is not None and (ranks := parsed_ranks(str(text)))]
    return round_up(max(named, default=1), lcm(*(max(1, ranks) for ranks in replicas)))


def _most_micro_batches(config: Config, world_size: int) -> int:
    """Where a budget of tokens makes micro-batches: their number if all rows had the greatest length."""
    budget, longest = config.train.micro_batch_tokens, config.data.max_prompt_length + config.generation.max_new_tokens
    assert budget is not None
    room = budget - budget % token_multiple(config.train.layout)  # as `packing.by_tokens` fills it
    return ceil_div(BatchMath.of(config, world_size).rollouts_per_replica, max(1, room // longest))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _costs(text: str) -> GivenCosts:
    """Milliseconds as seconds, gigabytes as bytes."""
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    *times, rate = values if len(values) == 5 else (*values, inf)
    if len(times) not in (3, 4) or not all(0 <= value < inf for value in times) or not sum(times[:3]) or not rate > 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not three or four times in milliseconds and perhaps the GB/s of a link, such as 10,10,8 or "
            "10,10,8,0.02,25")
    return GivenCosts(*(value / 1e3 for value in times), bytes_per_second=1e9 * rate)
