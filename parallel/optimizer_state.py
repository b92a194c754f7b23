"""The optimizer's state of one bucket: masters and moments of this rank's share, on the device or on the host.

Owns that memory and the AdamW step over it. It never looks at the whole model: clipping and learning rate come in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridflow.parallel.buckets import Bucket
from hybridflow.parallel.offload import CopyStream, host_buffer
from hybridflow.parallel.state_map import StateKind


@dataclass(frozen=True)
class AdamWSettings:
    """Hyper-parameters of AdamW (arXiv 1711.05101). `clip_grad_norm` None: gradients are not clipped."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad_norm: float | None = 1.0


class ShareState:
    """Master weights `[share]` and moments of one bucket, in the dtype of its gradients.

    On the device, a share whose parameters have that dtype is its own master. On the host everything is a copy, which
    is what offloading is for, and gradients and parameters travel through buffers made once.

    Args:
        stream: runs the copies between device and host; None where the state stays on the device.
    """

    def __init__(self, bucket: Bucket, settings: AdamWSettings, stream: CopyStream | None) -> None:
        self.bucket = bucket
        self._stream = stream
        self._outgoing: Tensor | None = None  # parameters on the host, where their dtype is not the master's
        if stream is None:
            self._grad = bucket.share
            master = bucket.my_params.to(bucket.grad_dtype)
        else:
            self._grad = host_buffer(bucket.share)
            master = host_buffer(bucket.share).copy_(bucket.my_params)
            if master.dtype != bucket.params.dtype:
                self._outgoing = host_buffer(bucket.my_params)
        self.master = nn.Parameter(master)
        self.master.grad = self._grad
        self._fetched: torch.cuda.Event | None = None
        self.adam = torch.optim.AdamW(
            [self.master], lr=0.0, betas=settings.betas, eps=settings.eps, fused=master.device.type in ("cpu", "cuda"),
            weight_decay=settings.weight_decay if bucket.decay else 0.0,
        )
        # As torch makes them in the first step, so that a checkpoint finds them before it.
        self.adam.state[self.master] = {
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
            StateKind.EXP_AVG.value: torch.zeros_like(master), StateKind.EXP_AVG_SQ.value: torch.zeros_like(master),
        }

    def tensor(self, kind: StateKind) -> Tensor:
        """The flat `[share]` tensor of master or moment."""
        return self.master.data if kind is StateKind.MASTER else self.adam.state[self.master][kind.value]

    def set_step(self, num_steps: int) -> None:
        """Say how many steps the moments have seen, for their bias correction."""
        self.adam.state[self.master]["step"].fill_(num_steps)

    def refresh(self) -> None:
        """Take the master from the parameters again. Moments stay."""
        self.master.data.copy_(self.bucket.my_params)

    def fetch(self) -> None:
        """Let the reduced gradient start its way to the state."""
        if self._stream is not None:
            self._fetched = self._stream.copy(self._grad, self.bucket.share)

    def step(self, factor: float, lr: float) -> None:
        """One step with the gradient times `factor`; the new parameters start their way back. The gradient is consumed.
        """
        if self._stream is not None:
            self._stream.landed(self._fetched)
        if factor != 1.0:
            self._grad.mul_(factor)
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()
        self.publish()

    def publish(self) -> None:
        """Give the parameters the values of the master."""
        params, master = self.bucket.my_params, self.master.data
        if self._stream is None:
            if master.data_ptr() != params.data_ptr():
                params.copy_(master)
            return
        outgoing = master if self._outgoing is None else self._outgoing.copy_(master)
        self._stream.copy(params, outgoing)
        self._stream.before_compute()
