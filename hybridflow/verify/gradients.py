"""What one combination gives, gradients above all: measured on each rank, and put together from all of them.

Goes the way of a training run: `TrainedRole` cuts the batch, `TrainEngine` runs the schedule, reduces and steps, and
gradients are read where the optimizer reads them. Whoever changes one of these verifies the change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hybridflow.batch import Batch
from hybridflow.engine.native import TrainEngine
from hybridflow.engine.options import EngineOptions, TrainOptions
from hybridflow.packing import MicroBatching
from hybridflow.parallel.box import Box
from hybridflow.parallel.mesh import Grid, Mesh
from hybridflow.parallel.optimizer import LrSchedule, StepInfo
from hybridflow.parallel.optimizer_state import AdamWSettings
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.state_map import StateKind, state_map
from hybridflow.parallel.world import World
from hybridflow.trainer.roles import TrainedRole
from hybridflow.verify.combinations import ROWS, Combination, Offload, TinyModel
from hybridflow.verify.workload import SEED, head_of, loss_of, model_of, ragged_batch, reduction_of

COPIES_DIFFER = 1e-10  # gradients here are of the order of 1
LR = LrSchedule(0.3)
# Of the gradients here, of norm 3 and more, clipping leaves elements of about 0.01. Beside this eps an update is nearly
# in proportion to them (Adam's own, 1e-8, would hide any wrong factor) and so is its rounding.
ADAMW = AdamWSettings(eps=0.1, weight_decay=0.1, clip_grad_norm=1.0)


@dataclass(frozen=True)
class Step:
    """What one optimizer step of one rank gave.

    Attributes:
        sums: of the loss, over all ranks.
        tensors: that this rank has, by box: `answers` and `scores` before the step, reduced gradients before clipping
            as `main_grad/NAME`, and weights after the step as NAME.
        reduced_bytes: that this rank put into reductions.
    """

    sums: dict[str, float]
    grad_norm: float
    tensors: dict[Box, np.ndarray]
    reduced_bytes: int


def engine_of(mesh: Mesh, combination: Combination) -> TrainEngine:
    """The engine under test, its weights drawn. Collective. One process alone, which others are held against, computes
    every row with a prompt of its own.
    """
    options = EngineOptions(
        torch.float64, combination.sequence_parallel, combination.layers_per_chunk, temperature=0.7,
        chunks=combination.chunks, recompute=combination.recompute, recompute_layers=combination.recompute_layers,
        offload=combination.offload is Offload.ROLE, share_prompts=mesh.world.size > 1)
    train = TrainOptions(combination.schedule, zero_stage=combination.zero_stage, bucket_bytes=combination.bucket_bytes,
                         offload_optimizer=combination.offload is Offload.OPTIMIZER)
    engine = TrainEngine(model_of(combination), mesh, head_of(combination.model), options, train=train,
                         adamw=ADAMW, lr=LR)
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
    """Two steps of one engine on one rank: with the combination's micro-batches, then with others. Collective.

    The second one is a step from the new weights, in which stale or wrong weights and what the first one left behind
    show.
    """
    engine = parts.engine(Mesh(Grid.of(combination.layout), world), combination)
    engine.end_turn()
    grads = _read_before_steps(engine)
    batch = ragged_batch(world, combination.some_failed)
    steps = []
    for micro_batching in (combination.micro_batching, combination.second_cut):
        before = engine.grads.reduced_bytes
        role = parts.role(engine, combination, micro_batching)
        answers = _answers(role, batch, combination.model)
        update = role.update(batch, range(ROWS), loss_of(combination.model))
        with engine.on_device():
            weights = _boxes(engine.shard_map, engine.storages, world.rank)
        steps.append(Step(update.sums, update.step.grad_norm, answers | grads | weights,
                          engine.grads.reduced_bytes - before))
    return steps


def _read_before_steps(engine: TrainEngine) -> dict[Box, np.ndarray]:
    """Filled with the reduced gradients whenever the optimizer begins a step, which clips them in place."""
    rank = engine.mesh.world.rank
    gradients = state_map(engine.shard_map, {rank: engine.grads.layout()}, (StateKind.MAIN_GRAD,))
    step, read = engine.optimizer.step, {}

    def read_and_step() -> StepInfo:
        read.update(_boxes(gradients, engine.grads.storages(), rank))
        return step()

    engine.optimizer.step = read_and_step
    return read


def _answers(role: TrainedRole, batch: Batch, model: TinyModel) -> dict[Box, np.ndarray]:
    """Of each response token, at home; a critic is asked for a score of each row too, as a reward model is."""
    answers = role.answer_tokens(batch).numpy()
    found = {Box("answers", (0,), answers.shape): answers} if answers.size else {}
    if model is TinyModel.CRITIC:
        found[Box("scores", (0,), (ROWS,))] = role.score_rows(batch).numpy()
    return found


def _boxes(shards: ShardMap, storages: Mapping[str, torch.Tensor], rank: int) -> dict[Box, np.ndarray]:
    # Cloned first: memory that numpy has seen cannot be moved to the host.
    return {shard.box: shard.view(storages).clone().numpy() for shard in shards.shards(rank)}


def whole(by_rank: Sequence[Mapping[Box, np.ndarray]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Canonical tensors from the boxes of all ranks; NaN where no rank has anything, copies differ or one is NaN."""
    found = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
    differ = {name: np.zeros(shape, dtype=bool) for name, shape in shapes.items()}
    for boxes in by_rank:
        for box, part in boxes.items():
            place = found[box.name][box.slices]
            differ[box.name][box.slices] |= (np.abs(place - part) > COPIES_DIFFER) | np.isnan(part)
            place[...] = part
    return {name: np.where(differ[name], np.nan, tensor) for name, tensor in found.items()}
