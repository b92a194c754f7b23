"""What a step of generation is, and who can execute it: the seam between the engine's loop and a stage's arithmetic.

Owns the record of a step and the interface of a runner. It computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Tokens of a prompt that are prefilled together. Example: `Chunk(first=3, count=32, slot=5, start=16)`.

    Attributes:
        first: the place of its first token in the step.
        count: how many follow each other there.
        slot: of the sequence.
        start: the position of the first one in its sequence; all before it is in the cache.
    """

    first: int
    count: int
    slot: int
    start: int


@dataclass(frozen=True)
class StepBatch:
    """One forward of sequences whose keys and values lie in blocks.

    Its first `num_decode` tokens are the newest ones of as many sequences; chunks of prompts follow, one after another.

    Attributes:
        chunks: in the order of their tokens.
        ids: int64 `[tokens]`.
        positions: int32 `[tokens]`, of each token in its sequence.
        slots: int32 `[tokens]`, the sequence of each token: a row of `tables`.
        tables: int32 `[max_rows, width]`, rows of any stride: the block of each 16 positions of a sequence. `width` is
            what the longest one takes. Of sequences that are not in the step, or behind a position that is, they may
            hold anything.
        sampled: int64 `[samples]`, the tokens of the step whose logits are wanted; one may be wanted several times.
    """

    num_decode: int
    chunks: tuple[Chunk, ...]
    ids: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor
    sampled: Tensor


class Drawer(Protocol):
    """Leaves nothing between a step and its tokens to the host."""

    def run_and_draw(self, batch: StepBatch, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """`StageRunner.run`, `logits`, and a draw from softmax(logits / temperature) as of `categorical.Categorical`.

        Args:
            uniforms: fp64 `[samples]` in [0, 1), contiguous; not read at temperature 0.

        Returns:
            tokens int64 `[samples]` and their log-probs `[samples]`, in memory of their own.
        """


class StageRunner(Protocol):
    """Executes steps on the layers of one rank, and owns the pages of their keys and values.

    The order is `prepare`, `allocate`, steps, `release`.

    Attributes:
        drawer: runs a step and draws from it at once; None where it cannot, or has not the whole model on this rank.
    """

    @property
    def drawer(self) -> Drawer | None: ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers of this rank."""

    def prepare(self) -> None:
        """The stage's parameters hold new weights: lay them out as steps read them, once."""

    def allocate(self, num_blocks: int) -> None:
        """Memory for so many blocks, without values; what was there is forgotten."""

    def release(self) -> None:
        """Give the pages back, and what `prepare` made."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the pages of blocks, (source, destination) each."""

    def run(self, batch: StepBatch, x: Tensor | None) -> Tensor:
        """The layers of this stage on the tokens of a step; their keys and values are written.

        Args:
            x: `[tokens, hidden]` of the stage before; None on the first stage, which looks `batch.ids` up.

        Returns:
            `[tokens, hidden]` for the next stage; on the last stage, behind the final norm, `[samples, hidden]`. It may
            be overwritten by the next call.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """`[samples, hidden]` of the last stage -> `[samples, vocab]`, fp32 or better, on each of its tensor ranks."""
