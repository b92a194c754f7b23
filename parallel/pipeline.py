"""The executor of pipeline schedules: it does what the schedule says, action by action.

Owns the messages between neighbouring stages and the activations in flight. It never decides an order (that is
`schedule`), never waits for the device, and knows neither the model nor the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hybridflow.parallel.mesh import AxisGroup, Mesh
from hybridflow.parallel.schedule import (
    FLOW,
    RECEIVES,
    RECV_OF,
    SEND_OF,
    SENDS,
    Action,
    Kind,
    Schedule,
    released_sends,
)


class PackedTokens(Protocol):
    """What the executor must know of a micro-batch: its packed ids `[tokens]`."""

    @property
    def input_ids(self) -> Tensor: ...


class Lane(Protocol):
    """Where the actions' times go."""

    def span(self, name: str) -> AbstractContextManager[object]: ...


StageModule = Callable[[Tensor, Any], Any]
LossFn = Callable[[Any, Any], tuple[Tensor, dict[str, Tensor]]]


class PipelineRunner:
    """Runs schedules on one stage.

    Args:
        stage_module: called as `stage_module(x, micro_batch)`; x is the `input_ids` `[tokens]` on the first stage, else
            the hidden states `[tokens, hidden]` (`[tokens/tp, hidden]` under sequence parallelism) of the stage before.
        mesh: its `pp` index is the stage; messages use `pipe_forward` and `pipe_backward`.
        hidden_size, dtype: of the hidden states; with the micro-batch's tokens they give every message's shape, so
            nothing is negotiated.
        sequence_parallel: whether hidden states are cut over `tp`.
    """

    def __init__(
        self, stage_module: StageModule, mesh: Mesh, hidden_size: int, dtype: torch.dtype,
        sequence_parallel: bool = False,
    ) -> None:
        self.stage_module = stage_module
        self.mesh = mesh
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.tokens_divisor = mesh.tp.size if sequence_parallel else 1

    def run(
        self,
        schedule: Schedule,
        micro_batches: Sequence[PackedTokens],
        loss: LossFn | None = None,
        on_reduce: Callable[[], None] = lambda: None,
        trace: Lane | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Run `schedule` over `micro_batches`, the same on every stage. Collective over the pipeline.

        Args:
            loss: on the last stage, of (its output, micro-batch): the scalar to differentiate and any metrics.
            on_reduce: called at REDUCE, once all gradients of this stage are there.
            on_step: called at STEP; nothing by default, for callers that step themselves.
            trace: gets a span for each action.
        Returns:
            On the last stage one item for each micro-batch: the metrics of `loss`, or the output where there is no
            loss. Elsewhere an empty list.
        Raises:
            ValueError: schedule, mesh, micro-batches and loss do not belong together.
        """
        stages = self.mesh.pp.size
        if (schedule.num_stages, schedule.num_micro_batches) != (stages, len(micro_batches)):
            raise ValueError(f"a schedule of {schedule.num_stages} stages and {schedule.num_micro_batches} "
                             f"micro-batches was given {stages} stages and {len(micro_batches)} micro-batches")
        if schedule.has_backward and loss is None:
            raise ValueError("a schedule with backwards needs a loss: use forward_only for outputs alone")
        run = _Run(self, schedule, micro_batches, loss, {Kind.REDUCE: on_reduce, Kind.STEP: on_step})
        with torch.set_grad_enabled(schedule.has_backward):
            for action in schedule.stages[self.mesh.pp.index]:
                with nullcontext() if trace is None else trace.span(str(action)):
                    run.do(action)
        run.finish()
        return [run.results[i] for i in range(len(micro_batches))] if self.mesh.is_last_stage else []


@dataclass
class _Message:
    """A transfer on its way; the tensor must outlive it."""

    work: dist.Work | None
    tensor: Tensor

    def wait(self) -> Tensor:
        assert self.work is not None, "this rank is not in the group of its own pipeline"
        self.work.wait()
        return self.tensor


@dataclass
class _Held:
    """What a micro-batch's backward needs. Its output itself is not here: only the autograd edge into the graph."""

    x: Tensor
    root: GradientEdge


@dataclass
class _Run:
    """The state of one run: messages and activations in flight, results so far."""

    runner: PipelineRunner
    schedule: Schedule
    micro_batches: Sequence[PackedTokens]
    loss: LossFn | None
    callbacks: dict[Kind, Callable[[], None]]
    messages: dict[Action, _Message] = field(default_factory=dict)
    to_send: dict[Action, Tensor] = field(default_factory=dict)
    held: dict[int, _Held] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.released = released_sends(self.schedule, self.runner.mesh.pp.index)

    def do(self, action: Action) -> None:
        if action.kind is Kind.F:
            self._forward(action)
        elif action.kind is Kind.B:
            self._backward(action)
        elif action.kind in self.callbacks:
            self.callbacks[action.kind]()
        elif action.kind in RECEIVES:
            self._post_receive(action)
        else:
            self._start_send(action)

    def finish(self) -> None:
        """Wait for the sends that no answer has confirmed."""
        for message in self.messages.values():
            message.wait()
        assert not self.to_send and not self.held

    def _forward(self, action: Action) -> None:
        i, mesh = _number(action), self.runner.mesh
        micro_batch = self.micro_batches[i]
        x = micro_batch.input_ids
        if not mesh.is_first_stage:
            x = self._received(Action(RECV_OF[Kind.F], i, action.stage)).requires_grad_(self.schedule.has_backward)
        out = self.runner.stage_module(x, micro_batch)
        if not mesh.is_last_stage:
            self.to_send[Action(SEND_OF[Kind.F], i, action.stage)] = out.detach()
        elif self.loss is None:
            self.results[i] = out
        else:
            out, self.results[i] = self.loss(out, micro_batch)
        if self.schedule.has_backward:
            self.held[i] = _Held(x, get_gradient_edge(out))

    def _backward(self, action: Action) -> None:
        i, mesh = _number(action), self.runner.mesh
        grad = None if mesh.is_last_stage else self._received(Action(RECV_OF[Kind.B], i, action.stage))
        held = self.held.pop(i)
        torch.autograd.backward(held.root, grad)
        if not mesh.is_first_stage:
            assert held.x.grad is not None
            self.to_send[Action(SEND_OF[Kind.B], i, action.stage)] = held.x.grad

    def _post_receive(self, action: Action) -> None:
        runner, (group, peer) = self.runner, self._peer(action)
        tokens = self.micro_batches[_number(action)].input_ids.shape[0] // runner.tokens_divisor
        buffer = torch.empty(tokens, runner.hidden_size, dtype=runner.dtype, device=runner.mesh.device)
        self.messages[action] = _Message(dist.irecv(buffer, peer, group=group.process_group), buffer)

    def _start_send(self, action: Action) -> None:
        group, peer = self._peer(action)
        tensor = self.to_send.pop(action).contiguous()
        self.messages[action] = _Message(dist.isend(tensor, peer, group=group.process_group), tensor)

    def _peer(self, action: Action) -> tuple[AxisGroup, int]:
        """The process group of the message's direction, and the global rank at the other end."""
        mesh, flow = self.runner.mesh, FLOW[action.kind]
        group = mesh.pipe_forward if flow > 0 else mesh.pipe_backward
        return group, group.ranks[group.index + (flow if action.kind in SENDS else -flow)]

    def _received(self, action: Action) -> Tensor:
        tensor = self.messages.pop(action).wait()
        for send in self.released[action]:
            self.messages.pop(send).wait()  # over already, see `released_sends`: this only lets go of the buffer
        return tensor


def _number(action: Action) -> int:
    assert action.micro_batch is not None, action
    return action.micro_batch
