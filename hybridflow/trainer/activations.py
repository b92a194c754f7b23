"""What the actor's activations take in training, worked out before a step is run: the longest rows, every stage.

Owns the sentence. The formulas are `models.activation_memory`'s, the order of forwards and backwards the schedule's.
"""

from __future__ import annotations

from hybridflow.config.batch_math import BatchMath, trained_at_once
from hybridflow.config.layouts import Role, role_layout
from hybridflow.config.schema import Config
from hybridflow.models.activation_memory import ActivationMemory, PackedShape
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.layout import chunk_layers
from hybridflow.packing import ceil_div, round_up
from hybridflow.parallel.schedules.actions import Schedule
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.trainer.engine_options import DTYPES, MIB, engine_options


def activation_peaks(config: Config, world_size: int, model: ModelConfig,
                     schedule: Schedule | None = None) -> tuple[int, ...]:
    """Bytes that a rank of each stage keeps for backward at most, where all rows are the longest.

    Args:
        schedule: None for that of one update of the config.
    """
    layout = role_layout(config, Role.ACTOR, world_size)
    options = engine_options(config, layout, DTYPES[config.train.mixed_precision])
    assert options.chunks is not None
    math = BatchMath.of(config, world_size)
    shape = longest_rows(config, math, layout.cp, layout.tp if layout.sequence_parallel else 1)
    if schedule is None:
        count = math.micro_batches or ceil_div(math.rollouts_per_replica, len(shape.lengths))
        schedule = ScheduleKind(config.train.schedule.value).compute(options.chunks, count)
    memory = ActivationMemory(model, Head.LANGUAGE_MODEL, options.dtype, layout.tp, layout.cp,
                              options.sequence_parallel and layout.tp > 1, options.recompute, options.recompute_layers)
    layers = chunk_layers(model.num_layers, options.chunks, options.layers_per_chunk)
    return memory.peaks(schedule, [shape] * schedule.num_micro_batches, layers)


def longest_rows(config: Config, math: BatchMath, cp: int = 1, multiple_of: int = 1) -> PackedShape:
    """A rank's part of the largest micro-batch: as many of the longest rows as run at once, or as there are."""
    length, at_once = config.data.max_prompt_length + config.generation.max_new_tokens, trained_at_once(config)
    rows = at_once.rows if at_once.tokens is None else max(1, at_once.tokens // length)
    assert rows is not None
    rows = min(rows, math.rollouts_per_replica)
    tokens = round_up(ceil_div(rows * length, cp), multiple_of)
    return PackedShape((length,) * rows, tokens, ceil_div(rows * config.generation.max_new_tokens, cp))


def activation_line(config: Config, world_size: int, model: ModelConfig, schedule: Schedule | None = None) -> str:
    """Example: "Activations of the actor: at most 3.1, 2.0 MiB on a rank of stages 0, 1 (4 rows of 108 tokens at once,
    recompute none)".
    """
    peaks = activation_peaks(config, world_size, model, schedule)
    shape = longest_rows(config, BatchMath.of(config, world_size))
    stages = "stage 0" if len(peaks) == 1 else f"stages {', '.join(str(stage) for stage in range(len(peaks)))}"
    return (f"Activations of the actor: at most {', '.join(f'{peak / MIB:.3g}' for peak in peaks)} MiB on a rank of "
            f"{stages} ({len(shape.lengths)} rows of {shape.lengths[0]} tokens at once, recompute "
            f"{config.train.recompute.value})")
