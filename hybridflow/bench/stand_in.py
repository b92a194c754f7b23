"""Stand-in devices: ranks whose model waits as long as a device would compute, so that a few cores carry all of them.

Owns how long which work takes, and where a trainer is made to wait for it. All numbers stay what the model gives: it
computes as well, within the time that its device takes. Everything else is real: messages, schedulers, the optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow.generation.runner import Drawer, StageRunner, StepBatch
from hybridflow.micro_batch import MicroBatch
from hybridflow.models.decoder import HeadOutput
from hybridflow.trainer.rl import RLTrainer

RIDGE = 200  # tokens: an H200 does 989e12 operations and reads 4.8e12 bytes a second, and bf16 wants one of each


class StandIn:
    """A device by its roofline: a forward reads the weights once, and above RIDGE tokens multiplying takes longer. A
    backward is two forwards.

    Args:
        seconds: that a read of the weights takes.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def forward_seconds(self, tokens: int) -> float:
        """Example: `StandIn(0.01).forward_seconds(400) == 0.02`."""
        return self.seconds * max(1.0, tokens / RIDGE)

    def generate(self, tokens: int, started: float) -> None:
        """Wait until a step of generation that has begun at `started` (`time.perf_counter`) is over."""
        _sleep_until(started + self.forward_seconds(tokens))

    def forward(self, tokens: int, started: float) -> None:
        """Likewise for a forward of scoring or training."""
        _sleep_until(started + self.forward_seconds(tokens))

    def backward(self, tokens: int, started: float) -> None:
        """Likewise for a backward."""
        _sleep_until(started + 2 * self.forward_seconds(tokens))


def stand_in(trainer: RLTrainer, device: StandIn) -> None:
    """Let actor, reference and generator of this rank, those that it has, take as long as on `device`."""
    roles = trainer.roles
    for role in (roles.actor, roles.reference):
        if role is not None and role.engine is not None:
            _pace_stage(role.engine.stage, device)
    generator = roles.sampler.hybrid.generator
    if generator is not None:
        generator.runner = PacedRunner(generator.runner, device)


class PacedRunner:
    """A `StageRunner`, and its own `Drawer`, whose steps take as long as on `device`."""

    def __init__(self, runner: StageRunner, device: StandIn) -> None:
        self._runner, self._device = runner, device

    @property
    def drawer(self) -> Drawer | None:
        return None if self._runner.drawer is None else self

    @property
    def block_bytes(self) -> int:
        return self._runner.block_bytes

    def prepare(self) -> None:
        self._runner.prepare()

    def allocate(self, num_blocks: int) -> None:
        self._runner.allocate(num_blocks)

    def release(self) -> None:
        self._runner.release()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._runner.copy_blocks(pairs)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._runner.logits(hidden)

    def run(self, batch: StepBatch, x: Tensor | None) -> Tensor:
        started = time.perf_counter()
        hidden = self._runner.run(batch, x)
        self._device.generate(len(batch.ids), started)
        return hidden

    def run_and_draw(self, batch: StepBatch, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        drawer, started = self._runner.drawer, time.perf_counter()
        assert drawer is not None, "asked of a runner that has one"
        drawn = drawer.run_and_draw(batch, uniforms, temperature)
        self._device.generate(len(batch.ids), started)
        return drawn


def _pace_stage(stage: nn.Module, device: StandIn) -> None:
    """Forwards of a whole model, and the backwards of those that are differentiated."""
    begun: list[float] = []

    def before(stage: nn.Module, inputs: tuple[Any, ...]) -> None:
        begun.append(time.perf_counter())

    def after(stage: nn.Module, inputs: tuple[Any, ...], output: HeadOutput) -> HeadOutput:
        micro_batch = inputs[1]
        assert isinstance(micro_batch, MicroBatch)
        tokens = micro_batch.position_ids.numel()
        device.forward(tokens, begun.pop())
        if not output.log_probs.requires_grad:
            return output
        return replace(output, log_probs=_Backward.apply(output.log_probs, device, tokens))

    stage.register_forward_pre_hook(before)
    stage.register_forward_hook(after)


class _Backward(torch.autograd.Function):
    """The identity, whose backward takes as long as that of a whole model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: StandIn, tokens: int) -> Tensor:
        ctx.device, ctx.tokens = device, tokens
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.device.backward(ctx.tokens, time.perf_counter())
        return grad, None, None


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
