"""AdamW on flat master weights, with the gradient norm of the whole model and a learning-rate schedule.

Owns master weights, moments, clipping and the decision to skip a step. Gradients come reduced from `MainGrads`; it
never reduces a gradient, and never decides when to step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from hybridflow.parallel.collectives import all_reduce
from hybridflow.parallel.gradients import Bucket, MainGrads
from hybridflow.parallel.mesh import AxisGroup


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
class AdamWSettings:
    """Hyper-parameters of AdamW (arXiv 1711.05101). `clip_grad_norm` None: gradients are not clipped."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad_norm: float | None = 1.0


@dataclass(frozen=True)
class StepInfo:
    """What one step did. `grad_norm` is before clipping, over the whole model; `lr` is what the step used or would
    have used; `skipped` says that the norm was not finite, so nothing changed.
    """

    grad_norm: float
    lr: float
    skipped: bool


class ShardedAdamW:
    """AdamW over the buckets of `MainGrads`: each rank steps its share of them and keeps fp32 masters of it only.

    Parameters that are fp32 (or fp64) already are their own masters. Ranks that hold copies of a parameter take the
    same decision and the same step, since all see the same norm.

    Args:
        grads: the main gradients, reduced before every `step`.
        replica: all ranks that hold one copy of the model (tp x pp).
    """

    def __init__(self, grads: MainGrads, replica: AxisGroup, settings: AdamWSettings, schedule: LrSchedule) -> None:
        self.grads = grads
        self.replica = replica
        self.settings = settings
        self.schedule = schedule
        self.num_steps = 0
        self.num_skipped = 0
        self.masters = [_master(bucket) for bucket in grads.buckets]
        self.adam = torch.optim.AdamW(
            [
                {"params": [master], "weight_decay": settings.weight_decay if bucket.decay else 0.0}
                for master, bucket in zip(self.masters, grads.buckets, strict=True)
            ],
            lr=schedule.at(0),
            betas=settings.betas,
            eps=settings.eps,
            fused=all(master.device.type in ("cpu", "cuda") for master in self.masters),
        )

    def step(self) -> StepInfo:
        """Clip, step, and give every rank the new parameters; skip if the norm is not finite. Collective.

        The gradients are consumed: call `zero_grad` before the next backward.
        """
        lr = self.schedule.at(self.num_steps)
        norm = self.grad_norm()
        grad_norm = norm.item()  # the one host sync of a step: the decision below is the host's
        if not math.isfinite(grad_norm):
            return self.skip(grad_norm)
        self._clip(norm)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self._publish()
        self.num_steps += 1
        return StepInfo(grad_norm, lr, skipped=False)

    def skip(self, grad_norm: float = 0.0) -> StepInfo:
        """Take no step, and count that: the norm is not finite, or there is nothing to learn from."""
        self.num_skipped += 1
        return StepInfo(grad_norm, self.schedule.at(self.num_steps), skipped=True)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.grads.zero()

    def grad_norm(self) -> Tensor:
        """Euclidean norm of the whole model's reduced gradient (fp64 scalar), each parameter counted once."""
        total = torch.zeros((), dtype=torch.float64, device=self.masters[0].device)
        for bucket in self.grads.buckets:
            for start, end in bucket.counted_ranges():
                total += torch.linalg.vector_norm(bucket.my_grads[start:end], dtype=torch.float64).square()
        all_reduce(total, self.replica)
        if self.grads.sharded:
            all_reduce(total, self.grads.dp)
        return total.sqrt()

    def refresh_masters(self) -> None:
        """Take the masters from the parameters again, after these were loaded from elsewhere. Moments stay."""
        for master, bucket in zip(self.masters, self.grads.buckets, strict=True):
            master.data.copy_(bucket.my_params)

    def _clip(self, norm: Tensor) -> None:
        if self.settings.clip_grad_norm is None:
            return
        # The epsilon is that of torch.nn.utils.clip_grad_norm_, to which we compare.
        scale = (self.settings.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for master in self.masters:
            assert master.grad is not None
            master.grad.mul_(scale.to(master.dtype))

    def _publish(self) -> None:
        """Masters to parameters, and every share to all data-parallel ranks."""
        for master, bucket in zip(self.masters, self.grads.buckets, strict=True):
            if master.data_ptr() != bucket.my_params.data_ptr():
                bucket.my_params.copy_(master.data)
            if self.grads.sharded:
                bucket.gather_params(self.grads.dp)


def _master(bucket: Bucket) -> nn.Parameter:
    """The bucket's share in the dtype of its gradients, which it takes as its own; no copy where it has that dtype."""
    master = nn.Parameter(bucket.my_params.to(bucket.grads.dtype))
    master.grad = bucket.my_grads
    return master
