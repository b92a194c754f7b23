"""The nouns of a schedule: what one stage does in one step, and the steps of every stage; and their text form.

Owns what a schedule is, not how one is made (`builders`), completed (`messages`), proved (`check`) or timed
(`simulate`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from hybridflow.parallel.schedules.chunks import Chunks


class Kind(Enum):
    """What an action does. Its value is its name in the text form.

    Messages carry the number of the chunk on this side: SEND_F of chunk c is received by RECV_F of chunk c + 1, SEND_B
    of chunk c by RECV_B of chunk c - 1.
    """

    F = "F"  # forward of a micro-batch through a chunk
    B = "B"  # backward; of the input alone where the schedule has a W of the same micro-batch and chunk
    W = "W"  # gradients of the matrices, which the B left for later
    SEND_F = "SEND_F"  # start sending the chunk's output to the next chunk
    RECV_F = "RECV_F"  # post the receive of the chunk's input; the F that uses it waits for it
    SEND_B = "SEND_B"  # start sending the gradient of the chunk's input to the chunk before
    RECV_B = "RECV_B"  # post the receive of the gradient of the chunk's output; the B that uses it waits for it
    REDUCE = "REDUCE"  # the reduce of a gradient bucket has started from here on (in the backward before, where it can)
    STEP = "STEP"  # optimizer step
    RESHARD = "RESHARD"  # send a bucket of the new weights to where they are used next


COMPUTE = (Kind.F, Kind.B, Kind.W)
SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)
OF_BUCKETS = (Kind.REDUCE, Kind.RESHARD)


@dataclass(frozen=True)
class Action:
    """One step of one stage.

    Attributes:
        index: the micro-batch of a computation or message, the bucket (of this stage) of REDUCE and RESHARD; None for
            STEP.
        chunk: numbered through the whole model; None for REDUCE, STEP and RESHARD.
    Example: `Action(Kind.F, 3, chunk=1)`, in text `F3.1`.
    """

    kind: Kind
    index: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        number = "" if self.index is None else str(self.index)
        return self.kind.value + number + ("" if self.chunk is None else f".{self.chunk}")


STEP = Action(Kind.STEP)
_WORD = re.compile(r"([A-Z_]+?)(?:(\d+)(?:\.(\d+))?)?")


@dataclass(frozen=True)
class Schedule:
    """The actions of every stage, in order. Example: 1F1B of two stages and three micro-batches, in time:

        stage 0   F0.0 F1.0 .    B0.0 F2.0 B1.0 .    B2.0
        stage 1   .    F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 .
    """

    chunks: Chunks
    num_micro_batches: int
    stages: tuple[tuple[Action, ...], ...]

    @cached_property
    def has_backward(self) -> bool:
        return any(action.kind is Kind.B for action in self.stages[0])

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the gradients of matrices have actions of their own."""
        return any(action.kind is Kind.W for action in self.stages[0])

    def to_text(self) -> str:
        """One line for each stage: `stage 0: F0.0 SEND_F0.0 RECV_B0.0 B0.0 REDUCE0 STEP`."""
        return "\n".join(f"stage {i}: " + " ".join(map(str, actions)) for i, actions in enumerate(self.stages))

    @classmethod
    def from_text(cls, text: str, chunks: Chunks) -> Schedule:
        """Read what `to_text` wrote.

        Raises:
            ValueError: a line or an action that is none (it is named).
        """
        stages = []
        for index, line in enumerate(text.strip().splitlines()):
            head, colon, actions = line.partition(":")
            if not colon or head.split() != ["stage", str(index)]:
                raise ValueError(f"line {index + 1} of a schedule must start with 'stage {index}:', not {line[:20]!r}")
            stages.append(tuple(_action(word, index) for word in actions.split()))
        numbers = [a.index for actions in stages for a in actions if a.chunk is not None and a.index is not None]
        return cls(chunks, max(numbers, default=-1) + 1, tuple(stages))


def _action(word: str, stage: int) -> Action:
    match, kinds = _WORD.fullmatch(word), {kind.value: kind for kind in Kind}
    if match is not None and match[1] in kinds:
        kind = kinds[match[1]]
        index, chunk = (None if number is None else int(number) for number in match.group(2, 3))
        has_index, has_chunk = kind is not Kind.STEP, kind not in (*OF_BUCKETS, Kind.STEP)
        if ((index is not None), (chunk is not None)) == (has_index, has_chunk):
            return Action(kind, index, chunk)
    raise ValueError(f"{word!r} on stage {stage} is not an action: use F0.1, SEND_F0.1, REDUCE0, STEP, RESHARD0, ...")
