"""The orders of computation that a pipeline can follow, each for any number of micro-batches.

Owns the closed forms and the names; the zero-bubble orders are found by `zero_bubble`. Messages and updates come later.
"""

from __future__ import annotations

from enum import Enum

from hybridflow.parallel.schedules.actions import Action, Kind, Schedule
from hybridflow.parallel.schedules.chunks import ChunkOrder, Chunks
from hybridflow.parallel.schedules.zero_bubble import zb_h1, zb_v


class ScheduleKind(Enum):
    """The order of a training step. Its value is its name in a config."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZB_V = "zb-v"

    def chunks(self, pp: int, vpp: int) -> Chunks:
        """How the model is cut for this schedule.

        Raises:
            ValueError: the number of chunks on a stage is not one that the schedule can have.
        """
        if pp == 1:
            wanted, right = "1 with one stage (pp 1)", vpp == 1
        elif self is ScheduleKind.INTERLEAVED:
            wanted, right = "at least 2", vpp >= 2
        elif self is ScheduleKind.ZB_V:
            wanted, right = "2", vpp == 2
        else:
            wanted, right = "1", vpp == 1
        if not right:
            raise ValueError(f"vpp {vpp} does not go with the schedule {self.value}: it must be {wanted}")
        return Chunks(pp, vpp, ChunkOrder.V if self is ScheduleKind.ZB_V and pp > 1 else ChunkOrder.LOOP)

    def compute(self, chunks: Chunks, m: int) -> Schedule:
        """F and B, and W where the backward is split, of `m` micro-batches.

        Raises:
            ValueError: no micro-batch, or chunks that are not this schedule's.
        """
        _check(m)
        if chunks != self.chunks(chunks.pp, chunks.vpp):
            raise ValueError(f"the schedule {self.value} cannot run on {chunks}")
        return BUILDERS[self](chunks, m)


def gpipe(chunks: Chunks, m: int) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965); every stage holds `m` activations."""
    stages = (tuple(Action(kind, i, stage) for kind in (Kind.F, Kind.B) for i in range(m))
              for stage in range(chunks.pp))
    return Schedule(chunks, m, tuple(stages))


def one_f_one_b(chunks: Chunks, m: int) -> Schedule:
    """Stage s runs min(pp - s - 1, m) forwards ahead, then one forward and one backward in turn (PipeDream-Flush,
    arXiv 2006.09503; Megatron-LM, arXiv 2104.04473): it holds at most min(pp - s, m) activations.
    """
    stages = []
    for stage in range(chunks.pp):
        forwards, backwards = ([Action(kind, i, stage) for i in range(m)] for kind in (Kind.F, Kind.B))
        stages.append(_in_turn(forwards, backwards, chunks.pp - stage - 1))
    return Schedule(chunks, m, tuple(stages))


def interleaved(chunks: Chunks, m: int) -> Schedule:
    """1F1B over several chunks a stage (arXiv 2104.04473 section 2.2): micro-batches go in groups of pp through one
    chunk of a stage after the other, and the warm-up is 2 (pp - s - 1) + (vpp - 1) pp forwards.

    Where the last group is not full its order is the full group's without the micro-batches that are not there: what
    is left of an order that ends, ends.
    """
    pp, vpp = chunks.pp, chunks.vpp
    slots = [(first + i, part) for first in range(0, m, pp) for part in range(vpp) for i in range(pp)]
    stages = []
    for stage in range(pp):
        forwards = [Action(Kind.F, i, part * pp + stage) for i, part in slots]
        backwards = [Action(Kind.B, i, (vpp - 1 - part) * pp + stage) for i, part in slots]
        full = _in_turn(forwards, backwards, _warm_up(chunks, stage))
        stages.append(tuple(action for action in full if action.index is not None and action.index < m))
    return Schedule(chunks, m, tuple(stages))


def forward_only(chunks: Chunks, m: int) -> Schedule:
    """Forwards alone: log-probabilities, values, scores.

    Each stage takes them in the order in which they can be ready when every forward takes one unit. Round and round:
    groups of pp micro-batches go through one chunk of a stage after the other. Down and up: micro-batch i enters chunk
    c at 2i + c, and of the two chunks of a stage one meets it at even times, the other at odd ones.

    Raises:
        ValueError: no micro-batch.
    """
    _check(m)
    pp = chunks.pp

    def start(action: Action) -> tuple[int, ...]:
        assert action.index is not None and action.chunk is not None
        if chunks.order is ChunkOrder.V:
            return (2 * action.index + action.chunk,)
        return action.index // pp, action.chunk, action.index

    stages = (sorted((Action(Kind.F, i, chunk) for chunk in chunks.of_stage(stage) for i in range(m)), key=start)
              for stage in range(pp))
    return Schedule(chunks, m, tuple(tuple(actions) for actions in stages))


def activation_bound(kind: ScheduleKind, chunks: Chunks, m: int) -> tuple[int, ...]:
    """For each stage the most activations that the schedule promises to hold, as `check.peak_in_flight` counts them."""
    pp, stages = chunks.pp, range(chunks.pp)
    full = m * chunks.vpp
    if kind is ScheduleKind.GPIPE:
        return (full,) * pp
    if kind is ScheduleKind.ONE_F_ONE_B:
        return tuple(min(pp - stage, full) for stage in stages)
    if kind is ScheduleKind.INTERLEAVED:
        return tuple(min(_warm_up(chunks, stage) + 1, full) for stage in stages)
    return (min(pp * chunks.vpp, full),) * pp


BUILDERS = {
    ScheduleKind.GPIPE: gpipe,
    ScheduleKind.ONE_F_ONE_B: one_f_one_b,
    ScheduleKind.INTERLEAVED: interleaved,
    ScheduleKind.ZB_H1: zb_h1,
    ScheduleKind.ZB_V: zb_v,
}


def _check(m: int) -> None:
    if m < 1:
        raise ValueError(f"a schedule needs at least one micro-batch, got {m}")


def _warm_up(chunks: Chunks, stage: int) -> int:
    """Forwards of an interleaved stage before its first backward."""
    return 2 * (chunks.pp - stage - 1) + (chunks.vpp - 1) * chunks.pp


def _in_turn(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    order = forwards[:warm_up]
    for place, backward in enumerate(backwards):
        order += forwards[warm_up + place : warm_up + place + 1] + [backward]
    return tuple(order)
