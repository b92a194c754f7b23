"""What the actor's activations take in training, worked out before a step is run: the longest rows, every stage.

Owns the sentence. The formulas are `models.activation_memory`'s, the order of forwards and backwards the schedule's.
"""

from __future__ import annotations

from hybridflow.config.batch_math import BatchMath, counted, trained_at_once
from hybridflow.config.command import Command
from hybridflow.config.layouts import Role, role_layout, token_multiple
from hybridflow.config.schema import Config
from hybridflow.models.activation_memory import ActivationMemory, PackedShape
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.layout import chunk_layers
from hybridflow.parallel.arithmetic import ceil_div, round_up
from hybridflow.parallel.schedules.actions import Schedule
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.trainer.engine_options import DTYPES, MIB, engine_options


def activation_peaks(config: Config, world_size: int, model: ModelConfig, schedule: Schedule | None = None,
                     command: Command = Command.TRAIN) -> tuple[int, ...]:
    """Bytes that a rank of each stage keeps for backward at most, where all rows are the longest.

    Args:
        schedule: None for that of one update of the config.
    """
    layout = role_layout(config, Role.ACTOR, world_size)
    options = engine_options(config, layout, DTYPES[config.train.mixed_precision])
    assert options.chunks is not None
    math = BatchMath.of(config, world_size)
    shape = longest_rows(config, math, layout.cp, token_multiple(layout) // layout.cp, command)
    if schedule is None:
        count = math.micro_batches or ceil_div(math.rollouts_per_replica, len(shape.lengths))
        schedule = ScheduleKind(config.train.schedule.value).compute(options.chunks, count)
    head = Head.SCORE if command is Command.REWARD_MODEL else Head.LANGUAGE_MODEL
    memory = ActivationMemory(model, head, options.dtype, layout.tp, layout.cp,
                              options.sequence_parallel and layout.tp > 1, options.recompute, options.recompute_layers)
    layers = chunk_layers(model.num_layers, options.chunks, options.layers_per_chunk)
    return memory.peaks(schedule, [shape] * schedule.num_micro_batches, layers)


def longest_rows(config: Config, math: BatchMath, cp: int = 1, multiple_of: int = 1,
                 command: Command = Command.TRAIN) -> PackedShape:
    """A rank's part of the largest micro-batch: as many of the longest rows as run at once, or as there are.

    The response of a pair in `sft` may be all of its tokens but one. Of pairs of two rows as many pairs run at once.

    Args:
        multiple_of: what a rank's tokens are padded to a multiple of.
    """
    response, at_once, multiple = config.generation.max_new_tokens, trained_at_once(config), cp * multiple_of
    length, rows_of_unit = config.data.max_prompt_length + response, 2 if command.has_pairs else 1
    if command is Command.SFT:
        response = length - 1
    if at_once.tokens is None:
        assert at_once.rows is not None
        units = at_once.rows
    else:
        room = at_once.tokens - at_once.tokens % multiple  # as `packing.by_tokens` fills it
        units = max(1, room // (length * rows_of_unit))
    rows = min(units, math.rollouts_per_replica) * rows_of_unit
    targets = rows if command is Command.REWARD_MODEL else rows * response  # a score head answers once a row
    return PackedShape((length,) * rows, round_up(rows * length, multiple) // cp, ceil_div(targets, cp))


def activation_line(config: Config, world_size: int, model: ModelConfig, schedule: Schedule | None = None,
                    command: Command = Command.TRAIN) -> str:
    """Example: "Activations of the actor: at most 3.1, 2.0 MiB on a rank of stages 0, 1 (4 rows of 108 tokens at once,
    recompute none)".
    """
    peaks = activation_peaks(config, world_size, model, schedule, command)
    layout = config.train.layout
    shape = longest_rows(config, BatchMath.of(config, world_size), layout.cp, token_multiple(layout) // layout.cp,
                         command)
    stages = "stage 0" if len(peaks) == 1 else f"stages {', '.join(str(stage) for stage in range(len(peaks)))}"
    # Ragged rows of the same tokens are padded by a quarter at most, in attention alone.
    most = "about" if trained_at_once(config).tokens is not None else "at most"
    return (f"Activations of the actor: {most} {', '.join(f'{peak / MIB:.3g}' for peak in peaks)} MiB on a rank of "
            f"{stages} ({counted(len(shape.lengths), 'row')} of {shape.lengths[0]} tokens at once, recompute "
            f"{config.train.recompute.value})")
