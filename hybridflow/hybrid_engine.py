"""The 3D-HybridEngine: the actor's weights, resharded from the training to the generation layout and freed after.

Owns a generation engine and the ways that its weights come by (HybridFlow, arXiv 2409.19256, section 5). It never
trains and never samples.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hybridflow.engine.blueprint import Blueprint, Elsewhere
from hybridflow.engine.native import TrainEngine
from hybridflow.generation.engine import Generator
from hybridflow.generation.engines.interface import GenerationEngine
from hybridflow.generation.limits import DEFAULT_LIMITS, GenerationLimits
from hybridflow.generation.runners import make_runner
from hybridflow.generation.weight_home import PackedHome, SharedHome, WeightHome, WeightMode
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.decoder import DecoderStage
from hybridflow.models.layout import chunk_layers, split_heads
from hybridflow.models.weights import decoder_shard_map
from hybridflow.observe.trace import settle_device
from hybridflow.parallel.assign import assign
from hybridflow.parallel.mesh import Grid, Layout, Mesh, Outside
from hybridflow.parallel.nodes import ONE_NODE, Nodes
from hybridflow.parallel.parameter_shares import share_map, share_storage
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.share import TRAINING, with_training
from hybridflow.row_moves import move_rows
from hybridflow.weight_route import ReshardCheck, Route

MakeEngine = Callable[[Blueprint, Mesh], tuple[WeightHome, GenerationEngine]]  # of a train engine, on a mesh
META = torch.device("meta")  # a stage without memory: the home of its weights gives it some, for each rollout


@dataclass(frozen=True)
class ReshardReport:
    """What one reshard cost this rank.

    Attributes:
        seconds: from its first round to its last one; after an update with the optimizer's step of this rank's shares,
            most of which is taken while buckets travel.
        lower_bound_bytes: of its destination boxes, those that it did not hold.
        extra_bytes: most memory taken at once: generation weights, and staging buffers of what is in flight.
    """

    seconds: float
    received_bytes: int
    lower_bound_bytes: int
    extra_bytes: int


class HybridEngine:
    """A generator that is lent the train engine's current weights. Making one is collective, and every method but those
    of one round is called on every rank of the world, whatever it has of the two.

    Weights come by two ways. `fill` takes them from the training weights. `fill_bucket`, at the end of an update, takes
    them from the shares that the optimizer has just stepped, where the data-parallel ranks share its state out: the
    same messages bring the training weights what other ranks have stepped, in place of an all-gather. It is there where
    training and generation have the same ranks.

    Example:
        hybrid.fill()
        completions = hybrid.generator.generate(prompts, params, seed, expected_version=train.version)
        hybrid.free()

    Attributes:
        train: the engine that trains, or word that other ranks have it.
        generator: refuses to generate under any version but the one that was last filled in. None, as `home`, on ranks
            that do not generate.
        home: where the generator's weights are.
        from_training, after_step: the two ways; one and the same where no rank has but a share.
        ends_updates: whether an update may end in a reshard by `fill_bucket`.
        version: of the weights that were last filled in, on the ranks that have any of them; None where they are freed.
        last_report: of the last reshard.
    """

    def __init__(self, train: TrainEngine | Elsewhere, mesh: Mesh | Outside, make: MakeEngine | None = None, *,
                 bucket_bytes: int, check: ReshardCheck = ReshardCheck.SAMPLED,
                 home_map: ShardMap | None = None) -> None:
        """
        Args:
            mesh: the generation mesh.
            make: makes the generator and its home; None is `own_engine` as it comes.
            bucket_bytes: bounds what is in flight while weights move.
            home_map: that of the home; for ranks outside of `mesh`, who have no home to say so. None is that of
                `own_engine` as it comes.
        """
        self.train, self.mesh = train, mesh
        self.home: WeightHome | None = None
        self.generator: GenerationEngine | None = None
        model = train.blueprint.model
        if isinstance(mesh, Mesh):
            self.home, self.generator = (make or own_engine)(train.blueprint, mesh)
            home_map = self.home.shard_map
        else:
            mesh.make_tp_blocks(split_heads(model, mesh.layout.tp, 0).kv_replicas)  # what the stage makes on the others
            home_map = home_map or decoder_shard_map(model, mesh.grid, Head.LANGUAGE_MODEL)
        train_map, layout = train.blueprint.shard_map, train.grads.layout() if isinstance(train, TrainEngine) else {}
        route = partial(Route, world=mesh.world, layout=layout, wire_dtype=train.blueprint.options.dtype,
                        bucket_bytes=bucket_bytes, check=check)
        self.from_training = self.after_step = route(train_map, home_map)
        self.ends_updates = set(train.blueprint.grid.ranks) == set(mesh.grid.ranks)
        if self.ends_updates and isinstance(train, TrainEngine) and train.grads.sharded:
            shares = share_map(train_map, layout, train.mesh, train.grads.sharded)
            self.after_step = route(shares, with_training(home_map, train_map))
        self.last_report = ReshardReport(0.0, 0, 0, 0)
        self._settle = settle_device(mesh.device)
        self._under_way: _UnderWay | None = None
        self._filled_at: int | None = None
        self.version: int | None = None

    @property
    def num_buckets(self) -> int:
        """Rounds of a reshard after an update on this rank: the RESHARD actions that its schedule ends in."""
        return self.after_step.num_rounds

    @property
    def is_current(self) -> bool:
        """Whether the generator has the train engine's weights of now: the same answer on every rank."""
        return self._filled_at == self.train.num_updates

    def fill(self) -> None:
        """Reshard the current training weights into the generator. Collective."""
        train = self.train
        assert isinstance(train, Elsewhere) or not train.optimizer.waiting, "an update under way goes by fill_bucket"
        version = self._told_version()
        for number in range(self.from_training.num_rounds):
            self._round(self.from_training, number, version)
        self._filled_at = train.num_updates

    def fill_bucket(self, number: int) -> None:
        """One round of the reshard that ends an update: steps what it reads, then sends it. After the last round the
        generator and every training shard have the new weights.
        """
        assert isinstance(self.train, TrainEngine) and self.ends_updates
        self._round(self.after_step, number, self.train.version)
        self._filled_at = self.train.num_updates

    def free(self) -> None:
        """Give the memory of the generation weights back."""
        if self.generator is not None:
            self.generator.sleep()
            self.home.free()
        self._filled_at = self.version = None

    def _told_version(self) -> int:
        """That of the weights; ranks that only generate hear it from one that trains."""
        train, world = self.train, self.mesh.world
        mine = [train.version] if isinstance(train, TrainEngine) else []
        trains, hears = train.blueprint.grid.ranks, set(self.mesh.grid.ranks) - set(train.blueprint.grid.ranks)
        speaks = tuple((0,) if rank == trains[0] else () for rank in range(world.size))
        told = tuple((0,) if rank in hears else () for rank in range(world.size))
        said = torch.tensor(mine if speaks[world.rank] else [], dtype=torch.int64, device=world.device)
        heard = move_rows(world, (1,), speaks, told, said.unsqueeze(1))
        return mine[0] if mine else int(heard) if len(heard) else 0

    def _round(self, route: Route, number: int, version: int) -> None:
        if number == 0:
            self._under_way = self._start(route, version)
        assert self._under_way is not None, "rounds are called in order, from 0"
        for bucket in route.steps[number]:
            self.train.optimizer.step_bucket(bucket)
        route.round(number, self._under_way.sources, self._under_way.destinations)
        if number == route.num_rounds - 1:
            self._finish(route, self._under_way)
            self._under_way = None

    def _start(self, route: Route, version: int) -> _UnderWay:
        """Make the generator's storages."""
        started, sources, destinations = self._now(), {}, {}
        if self.generator is not None:
            self.generator.sleep()
        if isinstance(self.train, TrainEngine):
            parameters = self.train.storages
            shares = {share_storage(i): bucket.my_params for i, bucket in enumerate(self.train.grads.buckets)}
            sources = parameters | shares
            destinations = {f"{TRAINING}{name}": tensor for name, tensor in parameters.items()}
        if self.home is not None:
            destinations |= self.home.take(destinations)
        return _UnderWay(started, route.stats.received_bytes, version, sources, destinations)

    def _finish(self, route: Route, reshard: _UnderWay) -> None:
        """Let the generator generate, with weights that are right.

        Raises:
            IntegrityError: they are not, on some rank; no rank's generator has any then.
        """
        version = reshard.version
        if isinstance(self.train, TrainEngine):
            for bucket in self.train.optimizer.waiting:  # of shares that nobody else wants
                self.train.optimizer.step_bucket(bucket)
            version = self.train.version
        route.verify(reshard.sources, reshard.destinations, version)
        reshard.destinations.clear()  # memory that the home may replace is not to be kept
        taken = 0
        if self.generator is not None:
            self.home.ready()
            self.generator.wake(version)
            taken = self.home.taken_bytes
        self.version = version
        received = route.stats.received_bytes - reshard.received_before
        self.last_report = ReshardReport(self._now() - reshard.started, received, route.lower_bound_bytes,
                                         taken + route.stats.peak_buffer_bytes)

    def _now(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self._settle is not None:
            self._settle()
        return time.perf_counter()


@dataclass(frozen=True)
class _UnderWay:
    """A reshard between its first and its last round."""

    started: float
    received_before: int
    version: int
    sources: dict[str, Tensor]
    destinations: dict[str, Tensor]


def own_engine(train: Blueprint, mesh: Mesh, *, limits: GenerationLimits = DEFAULT_LIMITS,
               weights: WeightMode = WeightMode.PACKED, decode: Callable[[Sequence[int]], str] | None = None,
               layers_per_stage: Sequence[int] | None = None) -> tuple[WeightHome, Generator]:
    """Our generator for the weights of `train`, without memory for them yet.

    Args:
        decode: as the generator's.
        layers_per_stage: of generation; None for an even cut.

    Raises:
        ValueError: weights that are shared with an engine which waits on the host between its turns.
    """
    model, options = train.model, train.options
    stage = generation_stage(model, mesh, options.dtype, META, layers_per_stage)
    wanted = decoder_shard_map(model, mesh.grid, Head.LANGUAGE_MODEL, None, layers_per_stage)
    is_packed = weights is WeightMode.PACKED
    if not is_packed and options.offload:
        raise ValueError("weights shared with training are gone while the train engine waits on the host: choose "
                         "packed weights, or an engine that stays")
    home = (PackedHome(stage, wanted, options.dtype, mesh.device) if is_packed else
            SharedHome(stage, train.shard_map, wanted, mesh.world.rank, mesh.device))
    runner = make_runner(stage, mesh, owns_weights=is_packed, batch_invariant=options.batch_invariant)
    return home, Generator(stage, mesh, model, runner, limits, decode)


def generation_stage(model: ModelConfig, mesh: Mesh, dtype: torch.dtype,
                     device: torch.device | None = None,
                     layers_per_stage: Sequence[int] | None = None) -> DecoderStage:
    """This rank's part of the model in a generation mesh, one chunk of layers on each stage, uninitialised; `device`
    None is the mesh's, `layers_per_stage` None an even cut.
    """
    chunks = Chunks(mesh.layout.pp)
    return DecoderStage(model, mesh, Head.LANGUAGE_MODEL, chunks=chunks,
                        chunk_layers=chunk_layers(model.num_layers, chunks, layers_per_stage),
                        sequence_parallel=False, dtype=dtype, device=device)


def generation_grid(train_map: ShardMap, train: Grid, model: ModelConfig, layout: Layout, nodes: Nodes = ONE_NODE, *,
                    within_node: bool = False, layers_per_stage: Sequence[int] | None = None) -> Grid:
    """Where each rank sits while it generates: the grid of `layout` for which the fewest bytes must move.

    It is at least as good as that of HybridFlow (arXiv 2409.19256, section 5.3), in which each rank's generation shard
    holds its training shard.

    Args:
        within_node: keep each tensor group in one node, if one fits there.
        layers_per_stage: of `layout`; None for an even cut.
    Example: train tp4, generate tp2 dp2: groups (0, 2) and (1, 3), and every rank receives a quarter of the model.
    """
    sizes = Counter(nodes.of(rank) for rank in train.ranks).values()
    fits = all(size % layout.tp == 0 for size in sizes)

    def wanted(grid: Grid) -> ShardMap:
        return decoder_shard_map(model, grid, Head.LANGUAGE_MODEL, None, layers_per_stage)

    return assign(train_map, train, layout, wanted, nodes=nodes, tp_within_node=within_node and fits)
