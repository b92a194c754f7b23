"""The executor of pipeline schedules: it does what the schedule says, action by action.

Owns the activations in flight, and what passes from chunk to chunk (between stages by `links`). It never decides an
order (that is `schedules`), never waits for the device, and knows neither the model nor the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hybridflow.parallel.links import Messages
from hybridflow.parallel.mesh import Mesh
from hybridflow.parallel.schedules.actions import RECEIVES, SENDS, Action, Kind, Schedule
from hybridflow.parallel.schedules.chunks import Chunks
from hybridflow.parallel.schedules.messages import receive_for, released_sends, send_after
from hybridflow.parallel.weight_grads import WeightGrads, WeightWork


class PackedTokens(Protocol):
    """What the executor must know of a micro-batch: its packed ids `[tokens]`, on every stage of the pipeline."""

    @property
    def input_ids(self) -> Tensor: ...


class Lane(Protocol):
    """Where the actions' times go."""

    def span(self, name: str) -> AbstractContextManager[object]: ...


KNOWN_SCHEDULES = 16  # kept with what was worked out for them; token budgets make many numbers of micro-batches

StageModule = Callable[[Tensor, Any, int], Any]
LossFn = Callable[[Any, Any], tuple[Tensor, dict[str, Tensor]]]


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Events:
    """What happens at the actions that are not the pipeline's own; nothing by default.

    Attributes:
        arm: called with buckets just before the action that adds their last gradients, so that the reduce of each can
            start inside it, as soon as its last gradient is there.
        reduce: called at REDUCE of a bucket, which has all its gradients: from here on its reduce has started.
        step, reshard: called at STEP, and at RESHARD of a bucket of new weights.
    Example: `Events(grads.arm, grads.start, step)`.
    """

    arm: Callable[[tuple[int, ...]], None] = _nothing
    reduce: Callable[[int], None] = _nothing
    step: Callable[[], None] = _nothing
    reshard: Callable[[int], None] = _nothing


NO_EVENTS = Events()


class PipelineRunner:
    """Runs schedules on one stage.

    Args:
        stage_module: called as `stage_module(x, micro_batch, chunk)`; x is the `input_ids` `[tokens]` for chunk 0, else
            the hidden states `[tokens, hidden]` (`[tokens/tp, hidden]` under sequence parallelism) of the chunk before.
        mesh: its `pp` index is the stage; messages use its `links`.
        chunks: which chunk is on which stage.
        hidden_size, dtype: of the hidden states; with the micro-batch's tokens they give every message's shape, so
            nothing is negotiated.
        sequence_parallel: whether hidden states are cut over `tp`.
        weight_grads: what the linears of the stage are attached to, for schedules that split the backward; None leaves
            all to B.
    Raises:
        ValueError: chunks on another number of stages than the mesh has.
    """

    def __init__(
        self, stage_module: StageModule, mesh: Mesh, chunks: Chunks, hidden_size: int, dtype: torch.dtype,
        sequence_parallel: bool = False, weight_grads: WeightGrads | None = None,
    ) -> None:
        if chunks.pp != mesh.pp.size:
            raise ValueError(f"chunks on {chunks.pp} stages do not fit a mesh with pp {mesh.pp.size}")
        self.stage_module = stage_module
        self.mesh = mesh
        self.chunks = chunks
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.tokens_divisor = mesh.tp.size if sequence_parallel else 1
        self.weight_grads = WeightGrads() if weight_grads is None else weight_grads
        self._programs: dict[int, _Program] = {}  # by the identity of schedules, which they keep alive

    def run(
        self,
        schedule: Schedule,
        micro_batches: Sequence[PackedTokens],
        loss: LossFn | None = None,
        events: Events = NO_EVENTS,
        trace: Lane | None = None,
    ) -> list[Any]:
        """Run `schedule`, with its messages, over `micro_batches`, the same on every stage. Collective over the
        pipeline.

        Args:
            loss: after the last chunk, of (its output, micro-batch): the scalar to differentiate and any metrics.
            events: what happens at REDUCE, STEP and RESHARD.
            trace: gets a span for each action.
        Returns:
            On the stage of the last chunk one item for each micro-batch: the metrics of `loss`, detached, or the output
            where there is no loss. Elsewhere an empty list.
        Raises:
            ValueError: schedule, chunks, micro-batches and loss do not belong together.
        """
        if (schedule.chunks, schedule.num_micro_batches) != (self.chunks, len(micro_batches)):
            raise ValueError(f"a schedule of {schedule.num_micro_batches} micro-batches over {schedule.chunks} was "
                             f"given {len(micro_batches)} micro-batches over {self.chunks}")
        if schedule.has_backward and loss is None:
            raise ValueError("a schedule with backwards needs a loss: use forward_only for outputs alone")
        program = self._program(schedule)
        run = _Run(self, program, micro_batches, loss, events)
        for action in program.actions:
            if action in program.arms:
                events.arm(program.arms[action])
            with nullcontext() if trace is None else trace.span(str(action)):
                run.do(action)
        run.finish()
        has_results = self.mesh.pp.index == self.chunks.head_stage
        return [run.results[i] for i in range(len(micro_batches))] if has_results else []

    def _program(self, schedule: Schedule) -> _Program:
        if id(schedule) not in self._programs:
            if len(self._programs) == KNOWN_SCHEDULES:
                self._programs.pop(next(iter(self._programs)))
            self._programs[id(schedule)] = _Program.of(schedule, self.mesh.pp.index)
        return self._programs[id(schedule)]

    def shape_of(self, micro_batch: PackedTokens) -> tuple[int, int]:
        """Of its hidden states on this rank."""
        return micro_batch.input_ids.shape[0] // self.tokens_divisor, self.hidden_size


@dataclass(frozen=True)
class _Program:
    """What a stage must know of a schedule, worked out once however often it is run.

    Attributes:
        arms: by the action that adds the last gradients, buckets to arm before it.
        split: (micro-batch, chunk) of every W.
        released: see `released_sends`; None for forwards alone.
    """

    schedule: Schedule
    actions: tuple[Action, ...]
    arms: dict[Action, tuple[int, ...]]
    split: frozenset[tuple[int, int]]
    released: dict[Action, tuple[Action, ...]] | None

    @classmethod
    def of(cls, schedule: Schedule, stage: int) -> _Program:
        actions = schedule.stages[stage]
        return cls(schedule, actions, _arms(actions),
                   frozenset(_place(action) for action in actions if action.kind is Kind.W),
                   released_sends(schedule, stage) if schedule.has_backward else None)


@dataclass
class _Held:
    """What a backward needs. The output of the forward is not here: only the autograd edge into its graph."""

    x: Tensor
    root: GradientEdge


@dataclass
class _Run:
    """The state of one run: what is in flight, and results so far.

    Attributes:
        ready: by the computation that uses them, tensors that were made on this stage.
        to_send: by their send, tensors that were made and leave the stage.
        held, kept: by (micro-batch, chunk), what its B and its W need.
    """

    runner: PipelineRunner
    program: _Program
    micro_batches: Sequence[PackedTokens]
    loss: LossFn | None
    events: Events
    ready: dict[Action, Tensor] = field(default_factory=dict)
    to_send: dict[Action, Tensor] = field(default_factory=dict)
    held: dict[tuple[int, int], _Held] = field(default_factory=dict)
    kept: dict[tuple[int, int], list[WeightWork]] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        runner = self.runner
        self.learns = self.program.released is not None
        self.messages = Messages(runner.chunks, self.program.released, runner.mesh,
                                 lambda i: runner.shape_of(self.micro_batches[i]), runner.dtype)

    def do(self, action: Action) -> None:
        if action.kind is Kind.F:
            self._forward(action)
        elif action.kind is Kind.B:
            self._backward(action)
        elif action.kind is Kind.W:
            self.runner.weight_grads.run(self.kept.pop(_place(action)))
        elif action.kind in SENDS:
            self.messages.send(action, self.to_send.pop(action))
        elif action.kind in RECEIVES:
            self.messages.post(action)
        else:
            self._report(action)

    def finish(self) -> None:
        self.messages.finish()
        assert not (self.ready or self.to_send or self.held or self.kept), self

    def _forward(self, action: Action) -> None:
        i, chunk = _place(action)
        micro_batch = self.micro_batches[i]
        x = micro_batch.input_ids if chunk == 0 else self._input_of(action).requires_grad_(self.learns)
        with torch.set_grad_enabled(self.learns):
            out = self.runner.stage_module(x, micro_batch, chunk)
            if chunk != self.runner.chunks.last:
                self._hand_on(action, chunk + 1, out.detach())
            elif self.loss is None:
                self.results[i] = out
            else:
                out, metrics = self.loss(out, micro_batch)
                # A metric with a history would hold the whole graph.
                self.results[i] = {name: value.detach() for name, value in metrics.items()}
        if self.learns:
            self.held[i, chunk] = _Held(x, get_gradient_edge(out))

    def _backward(self, action: Action) -> None:
        i, chunk = _place(action)
        grad = None if chunk == self.runner.chunks.last else self._input_of(action)
        held = self.held.pop((i, chunk))
        if (i, chunk) in self.program.split:
            with self.runner.weight_grads.keeping() as kept:
                torch.autograd.backward(held.root, grad)
            self.kept[i, chunk] = kept
        else:
            torch.autograd.backward(held.root, grad)
        if chunk != 0:
            assert held.x.grad is not None, f"the output of chunk {chunk} does not depend on its input"
            self._hand_on(action, chunk - 1, held.x.grad)

    def _input_of(self, compute: Action) -> Tensor:
        receive = receive_for(self.runner.chunks, compute)
        return self.ready.pop(compute) if receive is None else self.messages.wait(receive)

    def _hand_on(self, made_by: Action, chunk: int, tensor: Tensor) -> None:
        """Pass `tensor` to the same computation of the neighbouring `chunk`, here or on another stage."""
        send = send_after(self.runner.chunks, made_by)
        if send is None:
            self.ready[Action(made_by.kind, made_by.index, chunk)] = tensor
        else:
            self.to_send[send] = tensor

    def _report(self, action: Action) -> None:
        if action.kind is Kind.STEP:
            self.events.step()
            return
        assert action.index is not None, action
        (self.events.reduce if action.kind is Kind.REDUCE else self.events.reshard)(action.index)


def _place(compute: Action) -> tuple[int, int]:
    """(micro-batch, chunk)."""
    assert compute.index is not None and compute.chunk is not None, compute
    return compute.index, compute.chunk


def _arms(actions: Sequence[Action]) -> dict[Action, tuple[int, ...]]:
    """By the last B or W before them, the buckets of REDUCE actions."""
    arms: dict[Action, tuple[int, ...]] = {}
    gradients: Action | None = None
    for action in actions:
        if action.kind in (Kind.B, Kind.W):
            gradients = action
        elif action.kind is Kind.REDUCE and gradients is not None and action.index is not None:
            arms[gradients] = (*arms.get(gradients, ()), action.index)
    return arms
