"""From where the training rows are to the loader that feeds the steps: prompts, or supervised pairs.

Owns the choice between rows in memory, rows that are streamed and mixtures of both, once for both kinds of item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from hybridflow.data.lengths import LengthRule
from hybridflow.data.loader import PromptLoader, TokenisedPrompt
from hybridflow.data.mixture import MixedLoader
from hybridflow.data.records import PromptRecord
from hybridflow.data.row_files import RowFiles
from hybridflow.data.row_source import Numbering, RowLoader, RowSource
from hybridflow.data.sft import SftExample, SftLoader, sft_pairs
from hybridflow.data.streamed import Make, StreamedLoader, pair_maker, prompt_maker
from hybridflow.data.tokenizer import Tokenizer

Item = TypeVar("Item")


@dataclass(frozen=True)
class TrainSource:
    """Where some of the training rows are: in memory, or in files that are read as rows are needed.

    Attributes:
        weight: relative to the other sources'.
        records: in memory; empty where the rows are in `files`.

    Example: `TrainSource("sums", 1.0, records).num_rows == len(records)`.
    """

    name: str
    weight: float
    records: tuple[PromptRecord, ...] = ()
    files: RowFiles | None = None

    @property
    def num_rows(self) -> int:
        return len(self.records) if self.files is None else self.files.num_rows


@dataclass(frozen=True)
class Loading:
    """How rows are taken. `per_step` items a step; `buffer` rows wait where rows are streamed and shuffled; `rule`
    bounds an item's tokens; `vocab_size` is the model's.
    """

    per_step: int
    seed: int
    shuffle: bool
    buffer: int
    rule: LengthRule
    vocab_size: int


def prompt_loader(sources: Sequence[TrainSource], tokenizer: Tokenizer, how: Loading, held_out: Mapping[str, str]
                  ) -> RowLoader[TokenisedPrompt]:
    """Prompts. `held_out`: origins of held-out prompts by their text, for rows that are streamed.

    Raises ValueError for rows in memory that are not as they must be, and for the first row of a streamed file.
    """
    def held(records: Sequence[PromptRecord], numbering: Numbering) -> PromptLoader:
        return PromptLoader(records, tokenizer, how.per_step, how.seed, how.shuffle, how.rule.most, how.rule.overlong,
                            how.vocab_size, numbering)
    return _loader(sources, how, held, prompt_maker(tokenizer, how.rule, how.vocab_size), held_out)


def pair_loader(sources: Sequence[TrainSource], tokenizer: Tokenizer, how: Loading, held_out: Mapping[str, str]
                ) -> RowLoader[SftExample]:
    """Supervised pairs; as `prompt_loader`."""
    def held(records: Sequence[PromptRecord], numbering: Numbering) -> SftLoader:
        return SftLoader(sft_pairs(records), tokenizer, how.per_step, how.seed, how.shuffle, how.rule.most,
                         how.rule.overlong, how.vocab_size, numbering)
    return _loader(sources, how, held, pair_maker(tokenizer, how.rule, how.vocab_size), held_out)


def _loader(sources: Sequence[TrainSource], how: Loading, held: Callable[..., Any], make: Make[Item],
            held_out: Mapping[str, str]) -> Any:
    firsts = [0, *accumulate(source.num_rows for source in sources)]
    numberings = [Numbering(first, firsts[-1]) for first in firsts[:-1]]
    made = {source.name: held(source.records, numbering) if source.files is None
            else StreamedLoader(source.files, make, how.per_step, how.seed, how.shuffle, how.buffer, numbering,
                                held_out)
            for source, numbering in zip(sources, numberings, strict=True)}
    if len(sources) == 1:
        return made[sources[0].name]
    return MixedLoader(made, [source.weight for source in sources], how.per_step, how.seed)


def data_metrics(loader: RowSource[Any]) -> dict[str, float]:
    """How far the data have been gone through, and what was too long; of a mixture the epochs of every source too."""
    metrics = {"data/epoch": float(loader.epoch), "data/dropped": float(loader.counts.dropped),
               "data/truncated": float(loader.counts.truncated)}
    if isinstance(loader, MixedLoader):
        metrics |= {f"data/epoch_{name}": float(source.epoch) for name, source in loader.sources.items()}
    return metrics
