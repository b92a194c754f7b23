"""Engines and roles with one fault each, of the kinds that systems like this one were reported to have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hybridflow.algorithms.reduction import GlobalCounts
from hybridflow.batch import Rows
from hybridflow.engine.native import Loss, Output, TrainEngine, Update
from hybridflow.micro_batch import MicroBatch
from hybridflow.models.decoder import HeadOutput
from hybridflow.parallel.mesh import Mesh, _Axis, _make_lines
from hybridflow.parallel.optimizer_state import ShareState
from hybridflow.parallel.pipeline import Lane
from hybridflow.parallel.state_map import StateKind
from hybridflow.parallel.weight_grads import WeightWork
from hybridflow.trainer.roles import TrainedRole, response_counts
from hybridflow.verify.combinations import Combination
from hybridflow.verify.gradients import engine_of
from hybridflow.verify.workload import reduction_of


class LocalCounts(TrainedRole):
    """Divides by the tokens of its own replica."""

    def learn(self, mine: Rows, sizes: Sequence[int], counts: GlobalCounts, loss: Loss, *more) -> Update:
        counts = response_counts([len(sample.response) for sample in mine.samples])
        return super().learn(mine, sizes, counts, loss, *more)


class MeanOfMeans(TrainedRole):
    """Divides each micro-batch by its own tokens, and the sum by their number."""

    def learn(self, mine: Rows, sizes: Sequence[int], counts: GlobalCounts, loss: Loss, *more) -> Update:
        parts = []
        for run in mine.runs(sizes):
            lengths = tuple(len(sample.response) for sample in run.samples)
            mask = torch.ones(sum(lengths), dtype=torch.float64)
            parts.append(self.reduction.weights(mask, lengths, response_counts(lengths)) / len(sizes))
        weighted = Rows(mine.samples, mine.columns.with_columns(weight=torch.cat(parts)))
        return self.trainer.train([self.pack(run) for run in weighted.runs(sizes)], loss)


def local_counts(engine: TrainEngine, combination: Combination, micro_batching: object) -> TrainedRole:
    return LocalCounts(engine, micro_batching, micro_batching, reduction_of(combination.model))


def mean_of_means(engine: TrainEngine, combination: Combination, micro_batching: object) -> TrainedRole:
    return MeanOfMeans(engine, micro_batching, micro_batching, reduction_of(combination.model))


def tied_summed_twice(mesh: Mesh, combination: Combination) -> TrainEngine:
    """Sums the gradient of the tied matrix over its two stages twice."""
    return _with_groups_twice(engine_of(mesh, combination), ("embed.weight", "head.weight"))


def kv_counted_twice(mesh: Mesh, combination: Combination) -> TrainEngine:
    """Sums the gradient of replicated key-value heads over their ranks twice."""
    return _with_groups_twice(engine_of(mesh, combination), (".kv.weight",))


def never_zeroed(mesh: Mesh, combination: Combination) -> TrainEngine:
    """Forgets to forget the gradients of the step before."""
    engine = engine_of(mesh, combination)
    zero = engine.grads.zero

    def keep() -> None:
        kept = [bucket.share.clone() for bucket in engine.grads.buckets]
        zero()
        for bucket, share in zip(engine.grads.buckets, kept):
            bucket.share.copy_(share)

    engine.grads.zero = keep
    return engine


def update_dropped(mesh: Mesh, combination: Combination) -> TrainEngine:
    """Steps without moving a weight."""
    engine = engine_of(mesh, combination)
    for share in engine.optimizer.shares:
        share.step = lambda factor, lr: None
    return engine


def gather_lost(mesh: Mesh, combination: Combination) -> TrainEngine:
    """ZeRO without the all-gather: a rank has its own share of the new weights alone."""
    engine = engine_of(mesh, combination)

    def update_only(updates: Sequence[Callable[[], None]]) -> None:
        for update in updates:
            update()

    engine.optimizer._gather = update_only
    return engine


def not_decayed(mesh: Mesh, combination: Combination) -> TrainEngine:
    """Forgets the weight decay of what is in this rank's first decayed bucket."""
    engine = engine_of(mesh, combination)
    share = next(share for share in engine.optimizer.shares if share.bucket.decay)
    share.adam.param_groups[0]["weight_decay"] = 0.0
    return engine


def clipped_by_own_norm(mesh: Mesh, combination: Combination) -> TrainEngine:
    """Every stage clips by the norm of its own gradients, and logs the right one."""
    engine = engine_of(mesh, combination)
    clip_factor = engine.optimizer._clip_factor

    def by_own_norm(norm: float) -> float:
        return clip_factor(sum(float(bucket.share.square().sum()) for bucket in engine.grads.buckets) ** 0.5)

    engine.optimizer._clip_factor = by_own_norm
    return engine


def only_first_layers(mesh: Mesh, combination: Combination) -> TrainEngine:
    """Runs the first layer alone of every chunk but the first."""
    engine = engine_of(mesh, combination)
    layers = engine.stage.chunk_layers
    engine.stage.chunk_layers = {chunk: layers[chunk][:1] if chunk else layers[chunk] for chunk in layers}
    return engine


def answers_one_target_late(mesh: Mesh, combination: Combination) -> TrainEngine:
    """Gives each target the answer of the one before; training is right."""
    engine = engine_of(mesh, combination)
    forward = engine.forward

    def late(micro_batches: Sequence[MicroBatch], trace: Lane | None = None, *, keep_first: bool) -> list[Output]:
        return [out.roll(1) if isinstance(out, Tensor) else HeadOutput(out.log_probs.roll(1), out.entropy)
                for out in forward(micro_batches, trace, keep_first=keep_first)]

    engine.forward = late
    return engine


def last_weight_work_dropped(mesh: Mesh, combination: Combination) -> TrainEngine:
    """Never runs the last W of each step."""
    engine = engine_of(mesh, combination)
    train, run = engine.train, engine.weight_grads.run
    left = [0]

    def train_counted(micro_batches: Sequence[MicroBatch], loss: Loss, **more) -> Update:
        left[0] = len(micro_batches) * combination.vpp
        return train(micro_batches, loss, **more)

    def run_but_last(kept: list[WeightWork]) -> None:
        left[0] -= 1
        run(kept if left[0] else [])

    engine.train, engine.weight_grads.run = train_counted, run_but_last
    return engine


def context_not_summed(mesh: Mesh, combination: Combination) -> TrainEngine:
    """Sums gradients over dp only: each part of the context keeps its own."""
    engine = engine_of(mesh, combination)
    axis = _Axis(lambda c: (c.tp, c.pp, c.cp), "without the context")
    _make_lines(mesh.grid, mesh.world, axis.key, axis.purpose)
    engine.grads.data = mesh._axis(axis)
    return engine


def stale_weights(mesh: Mesh, combination: Combination) -> TrainEngine:
    """The last layer of each stage computes with a matrix as it was before the first step; its update is right."""
    engine = engine_of(mesh, combination)
    layer = list(engine.stage.layers.values())[-1]
    weight, forward = layer.mlp.down.weight, layer.forward
    drawn = weight.data.clone()

    def forward_with_drawn(*args) -> Tensor:
        now = weight.data.clone()
        weight.data.copy_(drawn)
        out = forward(*args)
        weight.data.copy_(now)
        return out

    layer.forward = forward_with_drawn
    return engine


def moments_forgotten(mesh: Mesh, combination: Combination) -> TrainEngine:
    """Begins every step with the first moments at zero."""
    engine = engine_of(mesh, combination)
    for share in engine.optimizer.shares:
        share.step = partial(_step_without_history, share, share.step)
    return engine


def _step_without_history(share: ShareState, step: Callable[[float, float], None], factor: float, lr: float) -> None:
    share.tensor(StateKind.EXP_AVG).zero_()
    step(factor, lr)


def one_rank_raises(mesh: Mesh, combination: Combination) -> TrainEngine:
    if mesh.world.rank == 1:
        raise ZeroDivisionError("planted")
    return engine_of(mesh, combination)


def _with_groups_twice(engine: TrainEngine, ends: tuple[str, ...]) -> TrainEngine:
    for bucket in engine.grads.buckets:
        if any(slot.name.endswith(ends) for slot in bucket.slots):
            bucket.groups = bucket.groups * 2
    return engine
