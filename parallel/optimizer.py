"""AdamW over the shares of all buckets, with the gradient norm of the whole model and a learning-rate schedule.

Owns clipping, the loss scale's part in a step, and the decision to skip one. Gradients come reduced from `MainGrads`;
it never reduces a gradient, and never decides when to step. New parameters are all-gathered, or left to who sends the
shares on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from hybridflow.parallel.collectives import all_reduce, start_all_gather
from hybridflow.parallel.gradients import MainGrads
from hybridflow.parallel.loss_scale import LossScale, LossScaleState
from hybridflow.parallel.mesh import AxisGroup
from hybridflow.parallel.offload import CopyStream
from hybridflow.parallel.optimizer_state import AdamWSettings, ShareState
from hybridflow.parallel.shard_map import ShardMap
from hybridflow.parallel.state_map import OPTIMIZER_STATE, gather_layouts, state_map, storage_name
from hybridflow.parallel.world import World

SQUARED_AT_ONCE = 1 << 16  # numbers


class Decay(Enum):
    """How the learning rate falls after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True)
class LrSchedule:
    """Learning rate of each optimizer step, counted from 0; a skipped step is not counted.

    Linear warm-up gives `peak * (step + 1) / warmup_steps`; after it the rate falls from `peak` to `floor`, which is
    reached at `total_steps`. Example: `LrSchedule(peak=1.0, warmup_steps=2, total_steps=4, decay=Decay.LINEAR)` gives
    0.5, 1.0, 1.0, 0.5, then 0.
    """

    peak: float
    warmup_steps: int = 0
    total_steps: int = 1
    decay: Decay = Decay.CONSTANT
    floor: float = 0.0

    def at(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.decay is Decay.CONSTANT:
            return self.peak
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        left = 1.0 - progress if self.decay is Decay.LINEAR else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.floor + (self.peak - self.floor) * left


@dataclass(frozen=True)
class StepInfo:
    """What one step did.

    Attributes:
        grad_norm: before clipping and without the loss scale, over the whole model.
        lr: what the step used or would have used.
        skipped: whether nothing changed: the norm was not finite, or there was nothing to learn from.
        loss_scale: what the gradients of this step were scaled by.
    """

    grad_norm: float
    lr: float
    skipped: bool
    loss_scale: float = 1.0


@dataclass(frozen=True)
class OptimizerCounters:
    """What a checkpoint keeps besides the tensors.

    Attributes:
        num_nonfinite: steps skipped in a row until now because the norm was not finite.
        loss_scale: None without one.
    Example: `OptimizerCounters(num_steps=100, num_skipped=1, num_nonfinite=0, loss_scale=None)`.
    """

    num_steps: int
    num_skipped: int
    num_nonfinite: int
    loss_scale: LossScaleState | None


class ShardedAdamW:
    """AdamW over the buckets of `MainGrads`: each rank steps its share of them and keeps fp32 masters of it only.

    Parameters that are fp32 (or fp64) already are their own masters, unless offloaded. All ranks take the same
    decision, since all see the same norm; so ranks that hold copies of a parameter take the same step.

    A step is skipped where any gradient on any rank is not finite, also one that its rank does not count in the norm.

    `step` is `begin`, `step_bucket` of each bucket and an all-gather. Who moves the new parameters from the shares
    itself (a reshard) calls the first two and leaves out the third: it must then give every rank what it lacks.

    Args:
        grads: the main gradients, reduced before every `step`.
        model: the ranks that hold one copy of the model together (tp x pp).
        offload: keep masters and moments on the host and step there. On a CPU the result is the same bit for bit.
        loss_scale: what losses are multiplied by (fp16); gradients are divided by it once, with the clipping.
        max_skips: so many steps in a row may be skipped for a norm that is not finite; None for any number. Steps that
            a falling loss scale costs count too: from 65536 to 1 it falls in 16 steps, so allow more than that.
    """

    def __init__(
        self, grads: MainGrads, model: AxisGroup, settings: AdamWSettings, schedule: LrSchedule, *,
        offload: bool = False, loss_scale: LossScale | None = None, max_skips: int | None = None,
    ) -> None:
        self.grads = grads
        self.model = model
        self.settings = settings
        self.schedule = schedule
        self.loss_scale = loss_scale
        self.max_skips = max_skips
        self.num_steps = 0
        self.num_skipped = 0
        self.num_nonfinite = 0  # in a row, until now
        self._device = grads.buckets[0].params.device
        self._stream = CopyStream(self._device) if offload else None
        self.shares = [ShareState(bucket, settings, self._stream) for bucket in grads.buckets]
        self._waiting: set[int] = set()  # buckets that the step under way has not reached yet
        self._factor, self._lr = 1.0, 0.0  # of that step

    @property
    def scale(self) -> float:
        """What to multiply losses by now."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def step(self) -> StepInfo:
        """Clip, step, and give every rank the new parameters; skip if the norm is not finite. Collective.

        The gradients are consumed: call `zero_grad` before the next backward.

        Raises:
            FloatingPointError: more steps in a row than `max_skips` had no finite norm; on all ranks alike.
        """
        info = self.begin()
        if not info.skipped:
            self._gather([partial(self.step_bucket, bucket) for bucket in range(len(self.shares))])
        return info

    def begin(self) -> StepInfo:
        """Decide about a step, and leave the shares to `step_bucket`. Collective; the step counts from here on.

        Raises:
            FloatingPointError: as `step`.
        """
        assert not self._waiting, f"buckets {sorted(self._waiting)} have not taken the step before"
        lr, scale = self.schedule.at(self.num_steps), self.scale
        norm, is_finite = self.grad_norm()
        if self.loss_scale is not None:
            self.loss_scale.update(is_finite)
        if not is_finite:
            return self._skip_nonfinite(StepInfo(norm, lr, skipped=True, loss_scale=scale))
        self._factor, self._lr = self._clip_factor(norm) / scale, lr
        self._waiting = set(range(len(self.shares)))
        if self._stream is not None:
            self._stream.after_compute()
        for share in self.shares:
            share.fetch()
        self.num_steps += 1
        self.num_nonfinite = 0
        return StepInfo(norm, lr, skipped=False, loss_scale=scale)

    def step_bucket(self, bucket: int) -> None:
        """Take this rank's share of one bucket through the step that has begun: once, and not where it was skipped.

        Nothing is sent: in `bucket.params` all but the share are old until they are gathered or come otherwise.
        """
        if bucket in self._waiting:
            self._waiting.remove(bucket)
            self.shares[bucket].step(self._factor, self._lr)

    @property
    def waiting(self) -> frozenset[int]:
        """The buckets that the step under way has not reached yet."""
        return frozenset(self._waiting)

    def skip(self) -> StepInfo:
        """Take no step, and count that: there is nothing to learn from."""
        self.num_skipped += 1
        return StepInfo(0.0, self.schedule.at(self.num_steps), skipped=True, loss_scale=self.scale)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        assert not self._waiting, f"buckets {sorted(self._waiting)} still need theirs: they have not stepped"
        self.grads.zero()

    def grad_norm(self) -> tuple[float, bool]:
        """Euclidean norm of the whole model's reduced gradient without the loss scale, each parameter counted once, and
        whether all gradients of all ranks are finite. Collective; the one host sync of a step.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)  # of counted and of other elements
        for bucket in self.grads.buckets:
            for place, counted in enumerate((True, False)):
                for start, end in bucket.counted_ranges(counted):
                    totals[place] += _squared(bucket.share[start:end])
        all_reduce(totals, self.model)
        if self.grads.sharded:
            all_reduce(totals, self.grads.data)
        squared, others = totals.tolist()
        if not math.isfinite(squared + others):
            return squared + others, False
        return math.sqrt(squared) / self.scale, True

    def refresh_masters(self) -> None:
        """Take the masters from the parameters again, after these were loaded from elsewhere. Moments stay."""
        for share in self.shares:
            share.refresh()

    def storages(self) -> dict[str, Tensor]:
        """This rank's flat state, as `state_map` names it."""
        return {storage_name(kind, i): share.tensor(kind)
                for kind in OPTIMIZER_STATE for i, share in enumerate(self.shares)}

    def state_map(self, weights: ShardMap, world: World) -> ShardMap:
        """Where every rank's `storages()` have which boxes of the canonical tensors' state. Collective over the world.

        Args:
            weights: of the model's parameters, with their names as storages.
        """
        return state_map(weights, gather_layouts(self.grads.layout(), world))

    def tensors(self) -> list[Tensor]:
        """The flat tensors of the state."""
        return list(self.storages().values())

    @property
    def counters(self) -> OptimizerCounters:
        """What a checkpoint must keep besides `storages()`."""
        scale = None if self.loss_scale is None else self.loss_scale.state
        return OptimizerCounters(self.num_steps, self.num_skipped, self.num_nonfinite, scale)

    def restore(self, counters: OptimizerCounters) -> None:
        """Go on counting from a checkpoint, whose tensors the caller puts into `storages()`."""
        self.num_steps, self.num_skipped = counters.num_steps, counters.num_skipped
        self.num_nonfinite = counters.num_nonfinite
        if self.loss_scale is not None and counters.loss_scale is not None:
            self.loss_scale.state = counters.loss_scale
        for share in self.shares:
            share.set_step(counters.num_steps)

    def publish(self) -> None:
        """Give the parameters the values of the masters, on every rank, after these were loaded. Collective."""
        if self._stream is not None:
            self._stream.after_compute()
        self._gather([share.publish for share in self.shares])

    def _gather(self, updates: Sequence[Callable[[], None]]) -> None:
        """Run the update of each bucket, and give all data-parallel ranks its parameters: they travel while the next
        bucket is stepped.
        """
        gathers = []
        for bucket, update in zip(self.grads.buckets, updates, strict=True):
            update()
            if bucket.sharded:
                gathers.append(start_all_gather(bucket.my_params, self.grads.data, out=bucket.params))
        for gather in gathers:
            gather.wait()

    def _clip_factor(self, norm: float) -> float:
        # The epsilon is that of torch.nn.utils.clip_grad_norm_, to which we compare.
        limit = self.settings.clip_grad_norm
        return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))

    def _skip_nonfinite(self, info: StepInfo) -> StepInfo:
        self.num_skipped += 1
        self.num_nonfinite += 1
        if self.max_skips is not None and self.num_nonfinite > self.max_skips:
            scaled = "" if self.loss_scale is None else f", the last at loss scale {info.loss_scale:g}"
            raise FloatingPointError(
                f"gradients were not finite in {self.num_nonfinite} optimizer steps in a row (at most {self.max_skips} "
                f"may be skipped{scaled}). Try a lower learning rate or a longer warm-up, look for extreme rewards, "
                "advantages or log-probs in the metrics, and train in bf16 or fp32 where this was fp16")
        return info


def _squared(x: Tensor) -> Tensor:
    """The sum of squares, fp64. A CPU copies what it adds up to fp64: little at once, which stays in its cache."""
    parts = (x,) if x.is_cuda else x.split(SQUARED_AT_ONCE)
    return sum((torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts),
               x.new_zeros((), dtype=torch.float64))
