"""The gradient that one combination gives: measured on each rank, and put together from all of them.

Goes the way of a training run: `TrainedRole` cuts the batch, `TrainEngine` runs the schedule and reduces, and the
gradients are read where the optimizer reads them. Whoever changes one of these verifies the change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hybridflow.engine.native import TrainEngine
from hybridflow.engine.options import EngineOptions, TrainOptions
from hybridflow.packing import MicroBatching
from hybridflow.parallel.box import Box
from hybridflow.parallel.mesh import Grid, Mesh
from hybridflow.parallel.optimizer import LrSchedule
from hybridflow.parallel.optimizer_state import AdamWSettings
from hybridflow.parallel.state_map import StateKind, state_map
from hybridflow.parallel.world import World
from hybridflow.trainer.roles import TrainedRole
from hybridflow.verify.combinations import Combination
from hybridflow.verify.workload import ROWS, SEED, head_of, loss_of, model_of, ragged_batch, reduction_of

ALL_AT_ONCE = MicroBatching(rows=ROWS)
FROZEN = LrSchedule(0.0)
COPIES_DIFFER = 1e-10  # gradients here are of the order of 1


@dataclass(frozen=True)
class Step:
    """What one optimizer step of one rank gave.

    Attributes:
        sums: of the loss, over all ranks.
        grads: reduced gradients that this rank has, by the box of the canonical tensor.
        reduced_bytes: that this rank put into reductions.
    """

    sums: dict[str, float]
    grad_norm: float
    grads: dict[Box, np.ndarray]
    reduced_bytes: int


def engine_of(mesh: Mesh, combination: Combination) -> TrainEngine:
    """The engine under test, its weights drawn. Collective."""
    options = EngineOptions(
        torch.float64, combination.sequence_parallel, temperature=0.7, recompute=combination.recompute,
        chunks=combination.chunks)
    train = TrainOptions(combination.schedule, zero_stage=combination.zero_stage, bucket_bytes=combination.bucket_bytes)
    engine = TrainEngine(model_of(combination), mesh, head_of(combination.model), options, train=train,
                         adamw=AdamWSettings(clip_grad_norm=None), lr=FROZEN)
    engine.draw(SEED)
    return engine


def role_of(engine: TrainEngine, combination: Combination, micro_batching: MicroBatching) -> TrainedRole:
    """The role under test, which cuts batches as `micro_batching` says."""
    return TrainedRole(engine, micro_batching, micro_batching, reduction_of(combination.model))


@dataclass(frozen=True)
class Parts:
    """What is verified. Other parts than ours are functions of a module too, since they are sent to other processes."""

    engine: Callable[[Mesh, Combination], TrainEngine] = engine_of
    role: Callable[[TrainEngine, Combination, MicroBatching], TrainedRole] = role_of


OURS = Parts()


def measure(world: World, combination: Combination, parts: Parts = OURS) -> list[Step]:
    """Two steps of one engine on one rank: with the combination's micro-batches, then all rows at once. Collective.

    The learning rate is 0, so that both must give the same, and what the first one leaves behind shows in the second.
    """
    mesh = Mesh(Grid.of(combination.layout), world)
    engine = parts.engine(mesh, combination)
    gradients = state_map(engine.shard_map, {world.rank: engine.grads.layout()}, (StateKind.MAIN_GRAD,))
    steps = []
    for micro_batching in (combination.micro_batching, ALL_AT_ONCE):
        before = engine.grads.reduced_bytes
        role = parts.role(engine, combination, micro_batching)
        update = role.update(ragged_batch(world), range(ROWS), loss_of(combination.model))
        storages = engine.grads.storages()
        grads = {shard.box: shard.view(storages).numpy().copy() for shard in gradients.shards(world.rank)}
        steps.append(Step(update.sums, update.step.grad_norm, grads, engine.grads.reduced_bytes - before))
    return steps


def whole(by_rank: Sequence[Mapping[Box, np.ndarray]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Canonical gradients from the boxes of all ranks; NaN where no rank has anything, copies differ or one is NaN."""
    found = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
    differ = {name: np.zeros(shape, dtype=bool) for name, shape in shapes.items()}
    for boxes in by_rank:
        for box, grad in boxes.items():
            place = found[box.name][box.slices]
            differ[box.name][box.slices] |= (np.abs(place - grad) > COPIES_DIFFER) | np.isnan(grad)
            place[...] = grad
    return {name: np.where(differ[name], np.nan, grad) for name, grad in found.items()}
