"""From the keys of a config to the options of an engine: degrees, chunks, precision, and how it trains.

Pure translation of config words into enums and dtypes of other packages; `build` makes the engines.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridflow.config.model_schema import LayoutConfig
from hybridflow.config.schema import Config
from hybridflow.config.words import MixedPrecision, ReduceDtype
from hybridflow.engine.options import EngineOptions, TrainOptions
from hybridflow.generation.weight_home import WeightMode
from hybridflow.generation.weight_layout import PACKED_EVERY_CALL
from hybridflow.models.recompute import Recompute
from hybridflow.parallel.comm_hook import CommHook
from hybridflow.parallel.mesh import Grid, Layout
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.schedules.chunks import Chunks

DTYPES = {MixedPrecision.NO: torch.float32, MixedPrecision.BF16: torch.bfloat16, MixedPrecision.FP16: torch.float16,
          MixedPrecision.FP64: torch.float64}
WIRE_DTYPES = {ReduceDtype.FP32: None, ReduceDtype.BF16: torch.bfloat16}  # None: as gradients are accumulated
MIB = 2**20


def grid_of(layout: LayoutConfig, ranks: Sequence[int] | None = None) -> Grid:
    """A layout whose dp is filled in, on these ranks; None for those of a world of its size."""
    assert layout.dp is not None, "filled in by role_layout"
    return Grid.of(Layout(layout.tp, layout.pp, layout.dp, layout.cp), ranks)


def chunks_of(config: Config, layout: LayoutConfig) -> Chunks:
    """The chunks of a role. With one on each stage any schedule can be asked for scores alone."""
    if layout.vpp == 1:
        return Chunks(layout.pp)
    return ScheduleKind(config.train.schedule.value).chunks(layout.pp, layout.vpp)


def engine_options(config: Config, layout: LayoutConfig, dtype: torch.dtype, temperature: float = 1.0) -> EngineOptions:
    """How a role of this layout runs its model."""
    layers = tuple(layout.layers_per_stage) if layout.layers_per_stage else None
    return EngineOptions(dtype, layout.sequence_parallel, layers, temperature, chunks_of(config, layout),
                         Recompute(config.train.recompute.value), config.train.recompute_layers,
                         config.train.offload.roles)


def weight_mode(config: Config, dtype: torch.dtype, device: torch.device) -> WeightMode:
    """How the generator holds the actor's weights where generation.weights leaves it open: packed where that decodes
    faster than from rows, where generation.batch_invariant needs it, or where the actor is away meanwhile.
    """
    asked = config.generation.weights
    if asked is not None:
        return WeightMode(asked.value)
    must_be = config.train.offload.roles or config.generation.batch_invariant
    is_packed = must_be or (device.type == "cpu" and dtype in PACKED_EVERY_CALL)
    return WeightMode.PACKED if is_packed else WeightMode.SHARED


def train_options(config: Config, comm_hook: CommHook | None = None) -> TrainOptions:
    """How actor and critic are trained; `comm_hook` None reduces as train.reduce_dtype says."""
    train = config.train
    return TrainOptions(
        ScheduleKind(train.schedule.value), zero_stage=train.zero_stage, bucket_bytes=train.reduce_bucket_mb * MIB,
        reduce_dtype=WIRE_DTYPES[train.reduce_dtype], hook=comm_hook, offload_optimizer=train.offload.optimizer,
        loss_scale=train.loss_scale, loss_scale_window=train.loss_scale_window,
        max_nonfinite_steps=train.max_nonfinite_steps,
    )
