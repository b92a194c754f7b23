"""What one rank of a replica runs at once: ragged rows, packed, and what the loss needs for each target.

No row is padded and there is no mask of positions: a row is its prompt and its response, and every head answers only
where a response token is predicted. A prompt of several rows can be packed once, with their responses as branches of
it: the same is computed, and less of it. Context ranks have parts of the same rows (`context`); `reassemble` brings
their answers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridflow.context import WHOLE, ContextCut, ContextPart
from hybridflow.packed_rows import Branches, PackedRows, Sample
from hybridflow.parallel.collectives import all_gather, copy_to, reduce_from
from hybridflow.parallel.mesh import AxisGroup
from hybridflow.target_rows import TargetRows, whole


@dataclass(frozen=True)
class TokenColumns:
    """Data of each response token, rows packed one after another: every field is `[targets]`, None where not computed.

    `weight` is the factor of the token's loss in the whole optimizer batch (see `algorithms.reduction`), and
    `pretrain_weight` that of a supervised loss beside it, on rows that have no other; the others
    are log-probabilities, advantages, returns and values in the units of their algorithm, `versions` those of the
    weights under which tokens were drawn, and `loss_mask` says which tokens are trained (1.0) or not (0.0).
    `row_reference` and `row_label` are fp64 numbers of a whole row, the same on each of its targets: the reference's
    log-prob of the response, and what the data says of it (see `algorithms.preference`).
    """

    weight: Tensor | None = None
    pretrain_weight: Tensor | None = None
    loss_mask: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    versions: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    old_values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    row_reference: Tensor | None = None
    row_label: Tensor | None = None

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
class MicroBatch:
    """Packed rows, or one context rank's part of them. For a row of p prompt and r response tokens, targets are the
    response and are predicted at positions p-1 .. p+r-2 of the row.

    Attributes:
        input_ids: `[tokens]` int64 of this rank; tokens = sum(lengths) + sum(branches.lengths) where rows are whole.
        position_ids: `[tokens]` int64, from 0 in each row.
        lengths: tokens of each row, on all context ranks together. Padding (id 0 at position 0) makes the tokens of a
            rank a multiple of tp for sequence parallelism, and equally many on all context ranks. It ends the last row
            of whole rows, since attention is causal and none of the row's own tokens sees it; of rows that are cut it
            belongs to none.
        branches: responses of rows that share their prompt, which is then one of the rows of `lengths`; they are packed
            behind all of these, and the last one has the padding. None where rows are cut.
        target_index: `[targets]` packed positions on this rank whose outputs predict the targets. The end of a shared
            prompt is there once for each of its branches.
        targets: `[targets]` the response tokens that this rank predicts, row after row.
        target_rows: `[targets]` int64, the row of each target.
        num_rows: of the samples packed, without padding.
        columns: what the loss needs for each target.
        part: which part of each row this is.
        answer_places: `[targets of all parts]` row after row, where each answer lies among those of all context ranks,
            `answers_per_part` of each; None for whole rows.
        answers_per_part: the most targets of any context rank; 0 for whole rows.
    """

    input_ids: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    target_index: Tensor
    targets: Tensor
    target_rows: Tensor
    num_rows: int
    columns: TokenColumns = TokenColumns()
    part: ContextPart = WHOLE
    answer_places: Tensor | None = None
    answers_per_part: int = 0
    branches: Branches = Branches()

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank runs."""
        return self.input_ids.shape[0]

    def same_tokens(self, other: MicroBatch) -> bool:
        """Whether a model answers both alike, whatever their columns."""
        if (self.lengths, self.branches, self.part) != (other.lengths, other.branches, other.part):
            return False
        return all(torch.equal(mine, others) for mine, others in (
            (self.input_ids, other.input_ids), (self.target_index, other.target_index), (self.targets, other.targets)))

    def rows(self, cp: AxisGroup) -> TargetRows:
        """The rows of the targets, whose parts lie on the ranks of `cp`."""
        if cp.size == 1:
            return TargetRows(self.target_rows, self.num_rows, whole)
        # What each rank's loss says of a row's sum depends on every rank's part of it: hence a sum both ways.
        return TargetRows(self.target_rows, self.num_rows, lambda sums: copy_to(reduce_from(sums, cp), cp),
                          counts_here=cp.index == 0)

    @classmethod
    def pack(cls, samples: Sequence[Sample], columns: TokenColumns = TokenColumns(), *, device: torch.device,
             multiple_of: int = 1, cp: ContextPart = WHOLE, share_prompts: bool = False) -> MicroBatch:
        """Pack `samples`, with padding at the end where tokens must be a multiple of `multiple_of`.

        An empty sequence of samples becomes a row of padding without a target, so that a replica without rows still
        runs every stage and joins every collective.

        Args:
            columns: of all targets of `samples`, whatever the part.
            cp: the part of each row to keep.
            share_prompts: pack a prompt that several samples have once, and of their responses what is seen by a token
                that is predicted: all but the last token. Rows must be whole.
        """
        assert all(sample.prompt for sample in samples), "the first response token is predicted from a prompt"
        layout = PackedRows.of(samples, share_prompts=share_prompts, unread=1)
        # Each is predicted at the place of the token before it.
        index = [place for prompt, response in layout.places if response for place in (prompt[-1], *response[:-1])]
        targets = [token for sample in samples for token in sample.response]
        rows = [row for row, sample in enumerate(samples) for _ in sample.response]
        return cls._packed(layout, index, targets, rows, columns, device, multiple_of, cp)

    @classmethod
    def pack_last_tokens(cls, samples: Sequence[Sample], columns: TokenColumns = TokenColumns(), *,
                         device: torch.device, multiple_of: int = 1, cp: ContextPart = WHOLE,
                         share_prompts: bool = False) -> MicroBatch:
        """Pack `samples` with one target a row, read at its last token: what a score head answers. `columns` are
        `[samples]`.
        """
        layout = PackedRows.of(samples, share_prompts=share_prompts)
        ends = [layout.place(row, sample.length - 1) for row, sample in enumerate(samples)]
        targets = [(*sample.prompt, *sample.response)[-1] for sample in samples]
        return cls._packed(layout, ends, targets, list(range(len(samples))), columns, device, multiple_of, cp)

    @classmethod
    def _packed(cls, layout: PackedRows, target_index: list[int], targets: list[int], rows: list[int],
                columns: TokenColumns, device: torch.device, multiple_of: int, cp: ContextPart) -> MicroBatch:
        """`target_index` are packed positions of whole rows, `rows` those of the targets."""
        lengths, branches, ids, positions = layout.lengths, layout.branches, layout.ids, layout.positions
        if cp.size > 1:
            assert not branches.lengths, "rows that are cut do not share prompts"
            uncut = cls(_ids(ids), _ids(positions), lengths, _ids(target_index), _ids(targets), _ids(rows),
                        len(layout.places), columns)
            return uncut._cut(cp, device, multiple_of)
        padding = -len(positions) % multiple_of or (0 if lengths else multiple_of)
        if branches.lengths:
            branches = replace(branches, lengths=_with_padding(branches.lengths, padding))
        else:
            lengths = _with_padding(lengths, padding)
        return cls(_ids([*ids, *[0] * padding], device), _ids([*positions, *[0] * padding], device), lengths,
                   _ids(target_index, device), _ids(targets, device), _ids(rows, device), len(layout.places), columns,
                   branches=branches)

    def _cut(self, part: ContextPart, device: torch.device, multiple_of: int) -> MicroBatch:
        """The part's tokens and targets of these whole rows without padding, and where all answers belong."""
        cut = ContextCut(self.lengths, part.size)
        owner, place = cut.places()
        answering = owner[self.target_index]  # [targets] the part that answers each
        kept = (answering == part.index).nonzero().squeeze(1)
        counts = torch.bincount(answering, minlength=part.size).tolist()
        most = max(counts)
        answers = torch.empty_like(answering)  # stable: a part answers in the order of the targets
        answers[answering.argsort(stable=True)] = torch.cat(
            [index * most + torch.arange(count) for index, count in enumerate(counts)])
        mine = cut.tokens(part.index)
        padding = (0, cut.tokens_per_rank(multiple_of) - mine.numel())
        return MicroBatch(
            F.pad(self.input_ids[mine], padding).to(device), F.pad(self.position_ids[mine], padding).to(device),
            self.lengths, place[self.target_index[kept]].to(device), self.targets[kept].to(device),
            self.target_rows[kept].to(device), self.num_rows, self.columns.select(kept.to(device)), part,
            answers.to(device), most)


def reassemble(values: Tensor, micro_batch: MicroBatch, cp: AxisGroup) -> Tensor:
    """The answers of all parts of the rows, on every rank of `cp`. Collective over `cp`; no gradient passes.

    Args:
        values: `[targets]` of this rank's part of `micro_batch`.

    Returns:
        `[targets of all parts]` row after row, as if the rows were whole.
    """
    if micro_batch.answers_per_part == 0:  # whole rows, or no target anywhere
        return values
    padded = values.new_zeros(micro_batch.answers_per_part)
    padded[: values.shape[0]] = values.detach()
    return all_gather(padded, cp).index_select(0, micro_batch.answer_places)


def _with_padding(lengths: tuple[int, ...], padding: int) -> tuple[int, ...]:
    """The last row is so much longer; without rows there is one of padding."""
    return (*lengths[:-1], sum(lengths[-1:]) + padding)


def _ids(values: Sequence[int], device: torch.device | None = None) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
