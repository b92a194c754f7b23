"""What one model replica runs at once: ragged rows packed one after another, and what the loss needs for each target.

Nothing is padded and there is no mask of positions: a row is its prompt and its response, and every head answers only
where a response token is predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenColumns:
    """Data of each response token, rows packed one after another: every field is `[targets]`, None where not computed.

    `weight` is the factor of the token's loss in the whole optimizer batch (see `algorithms.reduction`); the others
    are log-probabilities, advantages, returns and values in the units of their algorithm, and `loss_mask` says which
    tokens are trained (1.0) or not (0.0).
    """

    weight: Tensor | None = None
    loss_mask: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    old_values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None

    def select(self, index: Tensor) -> TokenColumns:
        """The columns at `index` [n] into the targets."""
        return TokenColumns(**{name: column[index] for name, column in self.present().items()})

    def present(self) -> dict[str, Tensor]:
        """The columns that have been computed, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: column for name, column in values.items() if column is not None}

    def with_columns(self, **columns: Tensor) -> TokenColumns:
        return replace(self, **columns)


@dataclass(frozen=True)
class Sample:
    """A prompt and the response to it. Example: `Sample((5, 9), (7, 2))` has 2 targets, seen from positions 1 and 2."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows. For a row of p prompt and r response tokens, targets are the response and are predicted at
    positions p-1 .. p+r-2 of the row.

    Attributes:
        input_ids: `[tokens]` int64; tokens = sum(lengths).
        position_ids: `[tokens]` int64, from 0 in each row.
        lengths: tokens of each row. The last row may end in padding (id 0 at position 0) that makes the total a
            multiple of tp for sequence parallelism: attention is causal, so none of its own tokens sees it.
        target_index: `[targets]` packed positions whose outputs predict the targets.
        targets: `[targets]` the response tokens, row after row.
        columns: what the loss needs for each target.
    """

    input_ids: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    target_index: Tensor
    targets: Tensor
    columns: TokenColumns = TokenColumns()

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @classmethod
    def pack(cls, samples: Sequence[Sample], columns: TokenColumns = TokenColumns(), *, device: torch.device,
             multiple_of: int = 1) -> MicroBatch:
        """Pack `samples`, with padding at the end of the last row where tokens must be a multiple of `multiple_of`.

        An empty sequence of samples becomes a row of padding without a target, so that a replica without rows still
        runs every stage and joins every collective.
        """
        lengths = [sample.length for sample in samples]
        positions = [position for length in lengths for position in range(length)]
        padding = -len(positions) % multiple_of or (0 if lengths else multiple_of)
        ids = [token for sample in samples for token in (*sample.prompt, *sample.response)] + [0] * padding
        positions += [0] * padding
        starts = [0, *accumulate(lengths)]
        index = [start + len(sample.prompt) - 1 + i
                 for start, sample in zip(starts, samples) for i in range(len(sample.response))]
        targets = [token for sample in samples for token in sample.response]
        lengths = [*lengths[:-1], sum(lengths[-1:]) + padding]
        as_ids = lambda values: torch.tensor(values, dtype=torch.int64, device=device)  # noqa: E731
        return cls(as_ids(ids), as_ids(positions), tuple(lengths), as_ids(index), as_ids(targets), columns)

    @classmethod
    def pack_last_tokens(cls, samples: Sequence[Sample], *, device: torch.device, multiple_of: int = 1) -> MicroBatch:
        """Pack `samples` with one target a row, read at its last token: what a score head answers."""
        packed = cls.pack(samples, device=device, multiple_of=multiple_of)
        ends = torch.tensor([*accumulate(sample.length for sample in samples)], dtype=torch.int64, device=device) - 1
        return replace(packed, target_index=ends, targets=packed.input_ids[ends])

