"""The native 3D engine: a decoder on a mesh that answers for packed rows (`ForwardEngine`) and learns (`TrainEngine`).

Owns the stage, its storages and, when it trains, main gradients and optimizer. It knows micro-batches and losses, and
nothing of rollouts, algorithms or how rows were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.micro_batch import MicroBatch, TokenColumns
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.decoder import DecoderStage, HeadOutput
from hybridflow.models.hf_import import load_hf
from hybridflow.models.init import init_weights
from hybridflow.models.layout import chunk_layers
from hybridflow.models.weights import decoder_shard_map
from hybridflow.parallel.collectives import all_reduce
from hybridflow.parallel.gradients import MainGrads
from hybridflow.parallel.mesh import Mesh, everyone
from hybridflow.parallel.optimizer import AdamWSettings, LrSchedule, ShardedAdamW, StepInfo
from hybridflow.parallel.pipeline import Events, Lane, PipelineRunner
from hybridflow.parallel.schedules.builders import ScheduleKind, forward_only
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.schedules.messages import with_messages
from hybridflow.parallel.schedules.training import build

# What the last stage gives for its targets: log-probs and entropy; or values or scores `[targets]`.
Output = HeadOutput | Tensor
# (output, columns of the same targets) -> (scalar loss, sums to log); both add up over micro-batches and replicas.
Loss = Callable[[Output, TokenColumns], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class EngineOptions:
    """How an engine lays out and runs its model.

    Attributes:
        layers_per_stage: None for an even split.
        temperature: of the distribution that log-probs and entropy are of.
    """

    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    layers_per_stage: tuple[int, ...] | None = None
    temperature: float = 1.0


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

    def __init__(self, model: ModelConfig, mesh: Mesh, head: Head, options: EngineOptions) -> None:
        self.model, self.mesh, self.head, self.options = model, mesh, head, options
        chunks = Chunks(mesh.layout.pp)
        self.shard_map = decoder_shard_map(model, mesh.grid, head, chunks, options.layers_per_stage)
        self.stage = DecoderStage(
            model, mesh, head, chunks=chunks,
            chunk_layers=chunk_layers(model.num_layers, chunks, options.layers_per_stage),
            sequence_parallel=options.sequence_parallel, dtype=options.dtype,
        )
        self.runner = PipelineRunner(self._run_stage, mesh, chunks, model.hidden_size, options.dtype,
                                     options.sequence_parallel)

    @property
    def storages(self) -> dict[str, Tensor]:
        """This rank's weights by storage name, as the shard map names them."""
        return {name: param.data for name, param in self.stage.named_parameters()}

    @property
    def token_multiple(self) -> int:
        """What the tokens of a micro-batch must be a multiple of."""
        return self.mesh.tp.size if self.options.sequence_parallel else 1

    @property
    def answers(self) -> bool:
        """Whether this rank is the one of its replica whose answers count: last stage, first tensor rank."""
        return self.mesh.is_last_stage and self.mesh.tp.index == 0

    def draw(self, seed: int) -> None:
        """Fill the weights at random, the same model for every layout."""
        init_weights(self.storages, self.shard_map, self.mesh.world.rank, seed, self.model)

    def load(self, folder: str | Path, seed: int) -> None:
        """Read this rank's boxes of a Hugging Face folder; a head that it does not have is drawn from `seed`."""
        load_hf(folder, self.storages, self.shard_map, self.mesh.world.rank, seed)

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[MicroBatch], trace: Lane | None = None) -> list[Output]:
        """The answers for each micro-batch on the last stage, [] on the others."""
        schedule = with_messages(forward_only(self.runner.chunks, len(micro_batches)))
        return self.runner.run(schedule, list(micro_batches), trace=trace)

    def _run_stage(self, x: Tensor, micro_batch: MicroBatch, chunk: int) -> Output | Tensor:
        # Entropy is a metric of training; where nothing is differentiated nobody asks for it.
        return self.stage(x, micro_batch, chunk, self.options.temperature, with_entropy=torch.is_grad_enabled())


class TrainEngine(ForwardEngine):
    """A model that learns, one optimizer step for each call of `train`.

    Attributes:
        version: counts optimizer steps that changed the weights; whoever copies the weights keeps the number.
    """

    def __init__(self, model: ModelConfig, mesh: Mesh, head: Head, options: EngineOptions, *,
                 schedule: ScheduleKind, zero_stage: int, adamw: AdamWSettings, lr: LrSchedule) -> None:
        super().__init__(model, mesh, head, options)
        self.schedule = schedule
        self.grads = MainGrads(self.stage, self.stage.grad_syncs(), mesh.dp, zero_stage)
        self.optimizer = ShardedAdamW(self.grads, mesh.replica, adamw, lr)
        self.version = 0

    def draw(self, seed: int) -> None:
        super().draw(seed)
        self.optimizer.refresh_masters()

    def load(self, folder: str | Path, seed: int) -> None:
        super().load(folder, seed)
        self.optimizer.refresh_masters()

    def train(self, micro_batches: Sequence[MicroBatch], loss: Loss, *, skip: bool = False,
              trace: Lane | None = None) -> Update:
        """One optimizer step: accumulate over this replica's micro-batches, reduce, step, as one schedule. Collective.

        Every rank calls it, also one whose replica has no rows (it gives one empty micro-batch).

        Args:
            skip: nothing is to be learned from this batch: take no step, but count it.
        """
        steps: list[StepInfo] = []

        def step() -> None:
            self.grads.reduce()
            steps.append(self.optimizer.skip() if skip else self.optimizer.step())

        self.optimizer.zero_grad()
        terms = self.runner.run(
            build(self.schedule, self.runner.chunks, len(micro_batches)), list(micro_batches),
            lambda output, micro_batch: loss(output, micro_batch.columns), Events(step=step), trace,
        )
        self.version += not steps[0].skipped
        return Update(self._add_up(terms, names=self._names_of(loss, micro_batches[0])), steps[0])

    def _names_of(self, loss: Loss, like: MicroBatch) -> tuple[str, ...]:
        """What the loss logs, found by asking it about no targets: stages without the head know it too."""
        nothing = torch.zeros(0, dtype=torch.promote_types(self.options.dtype, torch.float32), device=self.mesh.device)
        index = torch.zeros(0, dtype=torch.int64, device=self.mesh.device)
        output = HeadOutput(nothing, nothing) if self.head is Head.LANGUAGE_MODEL else nothing
        return tuple(loss(output, like.columns.select(index))[1])

    def _add_up(self, terms: list[dict[str, Tensor]], names: tuple[str, ...]) -> dict[str, float]:
        """Sums over micro-batches and replicas, from the ranks whose answers count."""
        table = torch.zeros(len(names), dtype=torch.float64, device=self.mesh.device)
        if self.answers:
            for sums in terms:
                table += torch.stack([sums[name].detach().double() for name in names])
        return dict(zip(names, all_reduce(table, everyone(self.mesh.world)).tolist(), strict=True))
