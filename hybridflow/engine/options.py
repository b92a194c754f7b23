"""How an engine lays out, runs and trains its model: plain values, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridflow.models.recompute import Recompute
from hybridflow.parallel.comm_hook import CommHook
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.schedules.chunks import Chunks


@dataclass(frozen=True)
class EngineOptions:
    """How an engine lays out and runs its model.

    Attributes:
        layers_per_chunk: of every chunk of the model; None for an even split.
        temperature: of the distribution that log-probs and entropy are of.
        chunks: None for one chunk a stage.
        recompute, recompute_layers: see `DecoderStage`.
        offload: between its turns, all that the engine holds waits in host memory.
        batch_invariant: see `DecoderStage`; costs a second copy of the weights while they are in use.
        share_prompts: compute a prompt once for all of its rows in a micro-batch, where rows are whole and not batch-
            invariant: less work, the same result to rounding.
    Example: `EngineOptions(torch.bfloat16, sequence_parallel=True)`.
    """

    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    layers_per_chunk: tuple[int, ...] | None = None
    temperature: float = 1.0
    chunks: Chunks | None = None
    recompute: Recompute = Recompute.NONE
    recompute_layers: int | None = None
    offload: bool = False
    batch_invariant: bool = False
    share_prompts: bool = True


@dataclass(frozen=True)
class TrainOptions:
    """How an engine trains.

    Attributes:
        zero_stage, bucket_bytes, reduce_dtype, hook: see `MainGrads`.
        offload_optimizer: keep masters and moments on the host, and step there.
        loss_scale, loss_scale_window: of fp16, where the loss scale starts and for how many good steps it stays.
        max_nonfinite_steps: so many steps in a row may be skipped because a gradient is not finite; None: any number.
    Example: `TrainOptions(ScheduleKind.ZB_V, zero_stage=2)`.
    """

    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    zero_stage: int = 0
    bucket_bytes: int | None = None
    reduce_dtype: torch.dtype | None = None
    hook: CommHook | None = None
    offload_optimizer: bool = False
    loss_scale: float = 65536.0
    loss_scale_window: int = 1000
    max_nonfinite_steps: int | None = None
