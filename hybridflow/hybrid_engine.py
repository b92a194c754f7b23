"""The 3D-HybridEngine: the actor's weights, resharded from the training to the generation layout and freed after.

Owns the generation stage's storages and the plan that fills them (HybridFlow, arXiv 2409.19256, section 5). It never
trains and never samples.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from hybridflow.engine.native import TrainEngine
from hybridflow.generation.engine import DEFAULT_LIMITS, GenerationLimits, Generator
from hybridflow.generation.weight_layout import lay_out_for_decoding
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.decoder import DecoderStage
from hybridflow.models.weights import decoder_shard_map
from hybridflow.observe.trace import settle_device
from hybridflow.parallel.mesh import Grid, Layout, Mesh
from hybridflow.parallel.plan import TransferPlan, lower_bound_numel
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.transfer import Transfer


@dataclass(frozen=True)
class ReshardReport:
    """What one reshard cost this rank. `lower_bound_bytes` are those of its generation boxes that it did not hold."""

    seconds: float
    received_bytes: int
    lower_bound_bytes: int


class HybridEngine:
    """A generator that is lent the train engine's current weights. Making one is collective.

    Example:
        hybrid.fill()
        completions = hybrid.generator.generate(prompts, params, seed, expected_version=train.version)
        hybrid.free()

    Attributes:
        generator: refuses to generate under any version but the one that was last filled in.
        last_report: of the last `fill`.
    """

    def __init__(self, train: TrainEngine, mesh: Mesh, *, bucket_bytes: int,
                 limits: GenerationLimits = DEFAULT_LIMITS) -> None:
        """`mesh` is the generation mesh; `bucket_bytes` bounds what is in flight while weights move."""
        self.train, self.mesh = train, mesh
        self._dtype = train.options.dtype
        model = train.model
        dst = decoder_shard_map(model, mesh.grid, Head.LANGUAGE_MODEL)
        self.plan = TransferPlan.between(train.shard_map, dst)
        self._transfer = Transfer(self.plan, mesh.world, wire_dtype=self._dtype, bucket_bytes=bucket_bytes)
        self._lower_bound = lower_bound_numel(train.shard_map, dst, mesh.world.rank) * self._dtype.itemsize
        self.stage = generation_stage(model, mesh, self._dtype)
        self.stage.requires_grad_(False)
        self._shapes = {name: param.shape for name, param in self.stage.named_parameters()}
        self.generator = Generator(self.stage, mesh, model, limits)
        self.free()
        self.last_report = ReshardReport(0.0, 0, self._lower_bound)
        self._settle = settle_device(mesh.device)
        self._started, self._received_before = 0.0, 0  # of the reshard under way

    @property
    def num_buckets(self) -> int:
        """Rounds of a reshard on this rank: the RESHARD actions that its schedule ends in."""
        return self._transfer.num_rounds

    @property
    def is_current(self) -> bool:
        """Whether the generator has the train engine's weights of now."""
        return self.generator.weight_version == self.train.version

    def fill(self) -> None:
        """Reshard the current training weights into the generator. Collective."""
        for number in range(self.num_buckets):
            self.fill_bucket(number)

    def fill_bucket(self, number: int) -> None:
        """One round of a reshard. The first makes the generator's storages, after the last it can generate."""
        if number == 0:
            self._started = self._now()
            self._received_before = self._transfer.stats.received_bytes
            for name, param in self.stage.named_parameters():
                param.data = torch.empty(self._shapes[name], dtype=self._dtype, device=self.mesh.device)
        storages = {name: param.data for name, param in self.stage.named_parameters()}
        self._transfer.round(number, self.train.storages, storages)
        if number == self.num_buckets - 1:
            lay_out_for_decoding(self.stage)
            self.generator.weight_version = self.train.version
            received = self._transfer.stats.received_bytes - self._received_before
            self.last_report = ReshardReport(self._now() - self._started, received, self._lower_bound)

    def _now(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self._settle is not None:
            self._settle()
        return time.perf_counter()

    def free(self) -> None:
        """Give the memory of the generation weights back."""
        for param in self.stage.parameters():
            param.data = torch.empty(0, dtype=self._dtype, device=self.mesh.device)
        self.generator.weight_version = None


def generation_stage(model: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> DecoderStage:
    """The whole model on the tensor ranks of a generation mesh, uninitialised."""
    return DecoderStage(model, mesh, Head.LANGUAGE_MODEL, chunks=Chunks(), chunk_layers=(range(model.num_layers),),
                        sequence_parallel=False, dtype=dtype)


def generation_grid(train_map: ShardMap, train: Grid, model: ModelConfig, tp: int) -> Grid:
    """Where each rank sits while it generates: of two rank orders the one in which fewer bytes must move.

    In the order of HybridFlow (arXiv 2409.19256, section 5.3) a generation tensor group takes training tensor ranks at
    an interval, so that each rank's generation shard holds its training shard; the other order is plain rank order.

    Example: train tp4, generate tp2 dp2: groups (0, 2) and (1, 3), and every rank receives a quarter of the model.
    """
    layout = Layout(tp=tp, dp=train.layout.size // tp)
    orders = [Grid.of(layout)]
    if train.layout.tp % tp == 0:
        orders.append(Grid(layout, _at_intervals(train, tp)))
    return min(orders, key=lambda grid: _moved(train_map, decoder_shard_map(model, grid, Head.LANGUAGE_MODEL)))


def _at_intervals(train: Grid, tp: int) -> tuple[int, ...]:
    interval = train.layout.tp // tp
    lines = train.lines(lambda at: (at.cp, at.dp, at.pp))  # the training tensor groups
    return tuple(line[place + i * interval] for line in lines for place in range(interval) for i in range(tp))


def _moved(src: ShardMap, dst: ShardMap) -> int:
    """Elements that cross a wire, over all ranks."""
    return sum(copy.box.numel for copy in TransferPlan.between(src, dst).copies if copy.source != copy.dest)
