"""Engines and roles with one fault each, of the kinds that systems like this one were reported to have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridflow.algorithms.reduction import GlobalCounts
from hybridflow.batch import Rows
from hybridflow.engine.native import Loss, TrainEngine, Update
from hybridflow.parallel.mesh import Mesh
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
        return self.trainer.train([self._pack(run) for run in weighted.runs(sizes)], loss)


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


def one_rank_raises(mesh: Mesh, combination: Combination) -> TrainEngine:
    if mesh.world.rank == 1:
        raise ZeroDivisionError("planted")
    return engine_of(mesh, combination)


def _with_groups_twice(engine: TrainEngine, ends: tuple[str, ...]) -> TrainEngine:
    for bucket in engine.grads.buckets:
        if any(slot.name.endswith(ends) for slot in bucket.slots):
            bucket.groups = bucket.groups * 2
    return engine
