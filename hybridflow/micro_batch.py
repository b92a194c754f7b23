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
        lengths: tokens of each row; a last row of padding may make the total a multiple of tp (sequence parallelism).
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

    def with_columns(self, **columns: Tensor) -> MicroBatch:
        return replace(self, columns=self.columns.with_columns(**columns))

    @classmethod
    def pack(cls, samples: Sequence[Sample], columns: TokenColumns = TokenColumns(), *, device: torch.device,
             multiple_of: int = 1) -> MicroBatch:
        """Pack `samples`, with a last row of padding where the tokens must be a multiple of `multiple_of`.

        An empty sequence of samples becomes one token of padding without a target, so that a replica without rows
        still runs every stage and joins every collective.
        """
        lengths = [sample.length for sample in samples]
        padding = -sum(lengths) % multiple_of or (0 if lengths else multiple_of)
        ids = [token for sample in samples for token in (*sample.prompt, *sample.response)] + [0] * padding
        if padding:
            lengths.append(padding)
        positions = [position for length in lengths for position in range(length)]
        starts = [0, *accumulate(lengths)]
        index = [start + len(sample.prompt) - 1 + i
                 for start, sample in zip(starts, samples) for i in range(len(sample.response))]
        targets = [token for sample in samples for token in sample.response]
        as_ids = lambda values: torch.tensor(values, dtype=torch.int64, device=device)  # noqa: E731
        return cls(as_ids(ids), as_ids(positions), tuple(lengths), as_ids(index), as_ids(targets), columns)

    @classmethod
    def pack_last_tokens(cls, samples: Sequence[Sample], *, device: torch.device, multiple_of: int = 1) -> MicroBatch:
        """Pack `samples` with one target a row, read at its last token: what a score head answers."""
        packed = cls.pack(samples, device=device, multiple_of=multiple_of)
        ends = torch.tensor(packed.lengths[:len(samples)], dtype=torch.int64, device=device).cumsum(0) - 1
        return replace(packed, target_index=ends, targets=packed.input_ids[ends])

