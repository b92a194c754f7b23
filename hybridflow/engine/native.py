"""The native 3D engine: a decoder on a mesh that answers for packed rows (`ForwardEngine`) and learns (`TrainEngine`).

Owns the stage, its storages and, when it trains, main gradients and optimizer. It knows micro-batches and losses, and
nothing of rollouts, algorithms or how rows were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hybridflow.engine.blueprint import Blueprint
from hybridflow.engine.options import EngineOptions, TrainOptions
from hybridflow.kernels.native_build import NativeLibrary, native_library
from hybridflow.kernels.native_ops import set_threads
from hybridflow.micro_batch import MicroBatch, TokenColumns
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.decoder import DecoderStage, HeadOutput
from hybridflow.models.hf_import import FRESH, FRESH_IN_TRAINING, load_hf
from hybridflow.models.init import init_weights
from hybridflow.models.layout import chunk_layers
from hybridflow.parallel.collectives import all_reduce
from hybridflow.parallel.gradients import MainGrads
from hybridflow.parallel.loss_scale import LossScale
from hybridflow.parallel.mesh import Mesh
from hybridflow.parallel.offload import HostCopy
from hybridflow.parallel.optimizer import LrSchedule, ShardedAdamW, StepInfo
from hybridflow.parallel.optimizer_state import AdamWSettings
from hybridflow.parallel.pipeline import KNOWN_SCHEDULES, Events, Lane, PipelineRunner
from hybridflow.parallel.schedules.actions import Schedule
from hybridflow.parallel.schedules.builders import ScheduleKind, activation_bound, forward_only
from hybridflow.parallel.schedules.check import validate
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.schedules.messages import with_messages
from hybridflow.parallel.schedules.training import build
from hybridflow.parallel.weight_grads import WeightGrads
from hybridflow.parallel.world import World
from hybridflow.target_rows import TargetRows

# What the last chunk gives for its targets: log-probs and entropy; or values or scores `[targets]`.
Output = HeadOutput | Tensor
# (output, columns and rows of the same targets) -> (scalar loss, sums to log); both add up over micro-batches, parts of
# rows and replicas.
Loss = Callable[[Output, TokenColumns, TargetRows], tuple[Tensor, dict[str, Tensor]]]


class Resharder(Protocol):
    """Who takes the new weights from the optimizer, bucket by bucket: it asks for the step of each bucket that it sends
    (`ShardedAdamW.step_bucket`), and sees to it that every rank's training weights are new after its last one.
    """

    @property
    def num_buckets(self) -> int: ...

    def fill_bucket(self, number: int) -> None: ...


@dataclass(frozen=True)
class Update:
    """What one optimizer step did: the loss's sums over all micro-batches and replicas, the same on every rank, and
    the step.
    """

    sums: dict[str, float]
    step: StepInfo


class ForwardEngine:
    """A model that only answers: reference, reward model, and the base of what trains.

    Storages hold uninitialised memory until `load` or `draw` fills them.
    """

    fresh_heads = FRESH

    def __init__(self, model: ModelConfig, mesh: Mesh, head: Head, options: EngineOptions) -> None:
        self.model, self.mesh, self.head, self.options = model, mesh, head, options
        if mesh.device.type == "cpu" and isinstance(native_library(), NativeLibrary):
            set_threads(torch.get_num_threads())
        self.blueprint = Blueprint(model, mesh.grid, head, options)
        self.chunks, self.shard_map = self.blueprint.chunks, self.blueprint.shard_map
        self.stage = DecoderStage(
            model, mesh, head, chunks=self.chunks,
            chunk_layers=chunk_layers(model.num_layers, self.chunks, options.layers_per_chunk),
            sequence_parallel=options.sequence_parallel, dtype=options.dtype, recompute=options.recompute,
            recompute_layers=options.recompute_layers, batch_invariant=options.batch_invariant,
        )
        self.weight_grads = WeightGrads()
        self.runner = PipelineRunner(self._run_chunk, mesh, self.chunks, model.hidden_size, options.dtype,
                                     options.sequence_parallel, self.weight_grads)
        # Token budgets make many numbers of micro-batches: only so many schedules are kept.
        self._forwards = lru_cache(KNOWN_SCHEDULES)(partial(_forwards, self.chunks))
        self._host_copy: HostCopy | None = None

    @property
    def storages(self) -> dict[str, Tensor]:
        """This rank's weights by storage name, as the shard map names them."""
        return {name: param.data for name, param in self.stage.named_parameters()}

    @property
    def world(self) -> World:
        return self.mesh.world

    @property
    def has_head(self) -> bool:
        """Whether this rank's stage has the last chunk."""
        return self.blueprint.has_head(self.world.rank)

    @property
    def answers(self) -> bool:
        """Whether this rank is the one of its replica whose whole answers count: with the head, first of tp and cp."""
        return self.has_head and self.mesh.tp.index == 0 and self.mesh.cp.index == 0

    def draw(self, seed: int) -> None:
        """Fill the weights at random, the same model for every layout."""
        self._require_turn()
        init_weights(self.storages, self.shard_map, self.mesh.world.rank, seed, self.model)

    def load(self, folder: str | Path, seed: int) -> None:
        """Read this rank's boxes of a Hugging Face folder; a head that it may lack is drawn from `seed`."""
        self._require_turn()
        load_hf(folder, self.storages, self.shard_map, self.mesh.world.rank, seed, self.fresh_heads)

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[MicroBatch], trace: Lane | None = None) -> list[Output]:
        """The answers for each micro-batch (its own targets) on the stage with the head, [] on the others."""
        self._require_turn()
        with self.stage.weights_stay():
            return self.runner.run(self._forwards(len(micro_batches)), list(micro_batches), trace=trace)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """This engine's turn: inside, all that it holds is on the device. Turns may nest."""
        if self._host_copy is None or not self._host_copy.on_host:
            yield
            return
        self._host_copy.to_device()
        try:
            yield
        finally:
            self.end_turn()

    def end_turn(self) -> None:
        """Wait on the host until the next turn, where `options.offload` says so."""
        if not self.options.offload:
            return
        if self._host_copy is None:
            self._host_copy = self._make_host_copy()
        if not self._host_copy.on_host:
            self._host_copy.to_host()

    def _require_turn(self) -> None:
        """What is done outside of a turn would read memory that is not there."""
        if self._host_copy is not None and self._host_copy.on_host:
            raise RuntimeError("this engine waits on the host: use it inside `with engine.on_device():`")

    def _make_host_copy(self) -> HostCopy:
        return HostCopy(self.storages.values())

    def _run_chunk(self, x: Tensor, micro_batch: MicroBatch, chunk: int) -> Output | Tensor:
        # Entropy is a metric of training; where nothing is differentiated nobody asks for it.
        return self.stage(x, micro_batch, chunk, self.options.temperature, with_entropy=torch.is_grad_enabled())


class TrainEngine(ForwardEngine):
    """A model that learns, one optimizer step for each call of `train`.

    Attributes:
        version: counts optimizer steps that changed the weights; whoever copies the weights keeps the number.
        num_updates: counts all optimizer steps, skipped ones too; ranks that do not have the engine know it as well.
    """

    fresh_heads = FRESH_IN_TRAINING

    def __init__(self, model: ModelConfig, mesh: Mesh, head: Head, options: EngineOptions, *,
                 train: TrainOptions, adamw: AdamWSettings, lr: LrSchedule) -> None:
        super().__init__(model, mesh, head, options)
        self.grads = MainGrads(self.stage, self.stage.grad_syncs(), mesh.data, train.zero_stage,
                               chunk_of=self.stage.chunk_of, bucket_bytes=train.bucket_bytes,
                               reduce_dtype=train.reduce_dtype, hook=train.hook, weight_grads=self.weight_grads)
        scale = LossScale(train.loss_scale, train.loss_scale_window) if options.dtype is torch.float16 else None
        self.optimizer = ShardedAdamW(self.grads, mesh.model, adamw, lr, offload=train.offload_optimizer,
                                      loss_scale=scale, max_skips=train.max_nonfinite_steps)
        self.version = self.num_updates = 0
        self._kept: tuple[MicroBatch, Output] | None = None  # with the graph of its forward
        self._schedule = lru_cache(KNOWN_SCHEDULES)(partial(
            _training, train.schedule, self.chunks, mesh.coord.pp, self.grads.bucket_chunks))

    def draw(self, seed: int) -> None:
        super().draw(seed)
        self.optimizer.refresh_masters()

    def load(self, folder: str | Path, seed: int) -> None:
        super().load(folder, seed)
        self.optimizer.refresh_masters()

    def forward(self, micro_batches: Sequence[MicroBatch], trace: Lane | None = None, *,
                keep_first: bool = False) -> list[Output]:
        """As `ForwardEngine.forward`.

        Args:
            keep_first: keep what a backward of the first micro-batch needs, until the next `train` or `forward`. That
                `train` computes no second forward of it where one of its micro-batches has the same tokens. Only where
                the model is one chunk here and stays on the device.
        """
        self._kept = None
        if not keep_first or self.chunks.count > 1 or self.options.offload:
            return super().forward(micro_batches, trace)
        self._require_turn()
        first, *rest = micro_batches
        with self.stage.weights_stay(), nullcontext() if trace is None else trace.span("F0"):
            output = self._run_chunk(first.input_ids, first, 0)
        answers = [_detached(output), *(super().forward(rest, trace) if rest else [])]
        self._kept = first, output
        return answers

    def _run_chunk(self, x: Tensor, micro_batch: MicroBatch, chunk: int) -> Output | Tensor:
        if self._kept is not None and torch.is_grad_enabled() and self._kept[0].same_tokens(micro_batch):
            (_, output), self._kept = self._kept, None
            return output
        return super()._run_chunk(x, micro_batch, chunk)

    def train(self, micro_batches: Sequence[MicroBatch], loss: Loss, *, skip: bool = False,
              trace: Lane | None = None, reshard: Resharder | None = None) -> Update:
        """One optimizer step: accumulate over this replica's micro-batches, reduce, step, reshard, as one schedule.
        Collective.

        Every rank calls it, also one whose replica has no rows (it gives one empty micro-batch).

        Args:
            skip: nothing is to be learned from this batch: take no step, but count it.
            reshard: takes the new weights; None if nobody wants them yet. With it there is no all-gather.
        """
        self._require_turn()
        steps: list[StepInfo] = []
        scale = self.optimizer.scale

        def scaled(output: Output, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            term, sums = loss(output, micro_batch.columns, micro_batch.rows(self.mesh.cp))
            return term if scale == 1.0 else term * scale, sums

        self.optimizer.zero_grad()
        events = Events(self.grads.arm, self.grads.start, lambda: steps.append(self._step(skip, reshard)),
                        lambda bucket: reshard.fill_bucket(bucket))
        with self.stage.weights_stay():  # until the step, behind which no forward comes
            terms = self.runner.run(self._schedule(len(micro_batches), 0 if reshard is None else reshard.num_buckets),
                                    list(micro_batches), scaled, events, trace)
        self._kept = None
        assert not self.optimizer.waiting, "the reshard left buckets that have not stepped"
        return Update(self._add_up(terms, names=self._names_of(loss, micro_batches[0])), steps[0])

    def _step(self, skip: bool, reshard: Resharder | None) -> StepInfo:
        """The whole step, or only its start where a reshard goes on with it."""
        self.grads.finish()
        take = self.optimizer.step if reshard is None else self.optimizer.begin
        info = self.optimizer.skip() if skip else take()
        self.version += not info.skipped
        self.num_updates += 1
        return info

    def _make_host_copy(self) -> HostCopy:
        buckets = self.grads.buckets
        kept = [bucket.params for bucket in buckets] + self.optimizer.tensors()
        return HostCopy(kept, scratch=(bucket.share for bucket in buckets))

    def _names_of(self, loss: Loss, like: MicroBatch) -> tuple[str, ...]:
        """What the loss logs, found by asking it about no targets: stages without the head know it too."""
        nothing = torch.zeros(0, dtype=torch.promote_types(self.options.dtype, torch.float32), device=self.mesh.device)
        index = torch.zeros(0, dtype=torch.int64, device=self.mesh.device)
        output = HeadOutput(nothing, nothing) if self.head is Head.LANGUAGE_MODEL else nothing
        return tuple(loss(output, like.columns.select(index), TargetRows(index, 0))[1])

    def _add_up(self, terms: list[dict[str, Tensor]], names: tuple[str, ...]) -> dict[str, float]:
        """Sums over micro-batches, replicas and parts of the context, from one tensor rank each with the head; the same
        on all ranks of the engine.
        """
        table = torch.zeros(len(names), dtype=torch.float64, device=self.mesh.device)
        if self.has_head and self.mesh.tp.index == 0:
            for sums in terms:
                table += torch.stack([sums[name].detach().double() for name in names])
        return dict(zip(names, all_reduce(table, self.mesh.members).tolist(), strict=True))


def _detached(output: Output) -> Output:
    if isinstance(output, Tensor):
        return output.detach()
    return HeadOutput(output.log_probs.detach(), None if output.entropy is None else output.entropy.detach())


def _forwards(chunks: Chunks, num_micro_batches: int) -> Schedule:
    return with_messages(forward_only(chunks, num_micro_batches))


def _training(kind: ScheduleKind, chunks: Chunks, stage: int, bucket_chunks: tuple[int, ...], num_micro_batches: int,
              num_reshards: int) -> Schedule:
    """With the buckets of `stage`; those of other stages are theirs to know, and nobody waits for them in a schedule.

    It is proved before it is run: that it computes everything once and ends, within the memory that its kind promises.
    """
    buckets = [bucket_chunks if other == stage else () for other in range(chunks.pp)]
    reshards = [num_reshards if other == stage else 0 for other in range(chunks.pp)]
    schedule = build(kind, chunks, num_micro_batches, buckets, reshards)
    validate(schedule, activation_bound(kind, chunks, num_micro_batches), buckets)
    return schedule
