"""Reward models: decoders of ours on a mesh, and whole text classifiers on each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hybridflow.batch import Batch
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.models.text_classifier import TextClassifier
from hybridflow.parallel.world import World
from hybridflow.response_text import ResponseEnds, answer_text
from hybridflow.trainer.rewards.part import Answer, Asked, model_outcome
from hybridflow.trainer.roles import ScoringRole, sum_over_world


class _ModelPart:
    """What both kinds share: they begin when their batch is whole, and no answer is simply right."""

    right_score: float | None = None
    runs_beside = False

    def submit(self, key: int, row: int, prompt: TokenisedPrompt, response: Sequence[int]) -> None:
        """Rows are scored together."""

    def begin(self, asked: Asked) -> None:
        """Every rank works for every row in `finish`."""

    def close(self) -> None:
        """Nothing to end."""


@dataclass(frozen=True)
class Rereader:
    """How rows are read by a model whose tokenizer is not the actor's: in words, and encoded anew as a prompt with its
    response. Texts beyond `max_tokens` lose their beginning.

    Attributes:
        spoken, read: the actor's tokenizer and the model's.
    """

    spoken: Tokenizer
    ends: ResponseEnds
    read: Tokenizer
    max_tokens: int

    def sample(self, prompt: TokenisedPrompt, response: Sequence[int]) -> tuple[Sample, bool]:
        """The row in the model's ids, and whether it was too long. A response that ended gets the model's own end."""
        ids = self.read.encode_prompt(prompt.record.prompt)
        ids = [*ids, *self.read.encode(answer_text(self.spoken, response, self.ends))]
        if response and response[-1] in self.ends.ids:
            ids.append(self.read.eos_id)
        kept = ids[-self.max_tokens:]
        return Sample(tuple(kept[:-1]), tuple(kept[-1:])), len(ids) > len(kept)


class DecoderPart(_ModelPart):
    """A decoder with a score head, in a layout of its own, reads each row's last token. `rereader` is None where it has
    the actor's tokenizer, and reads the very ids.
    """

    def __init__(self, role: ScoringRole, world: World, rereader: Rereader | None = None) -> None:
        self.role, self.world, self.rereader = role, world, rereader

    def finish(self, asked: Asked) -> Answer:
        if not asked.rows:
            return Answer({})
        home = list(asked.at_home(self.world))
        samples, num_truncated = [sample for _, sample in home], 0
        if self.rereader is not None:
            read = [self.rereader.sample(asked.prompt(row), sample.response) for row, sample in home]
            samples, num_truncated = [sample for sample, _ in read], sum(cut for _, cut in read)
        scores = self.role.score_rows(rows_alone(asked.batch, asked.rows, samples, self.world)).tolist()
        by_row = dict(zip(asked.rows, scores, strict=True))
        return Answer({row: model_outcome(by_row[row]) for row, _ in home}, num_truncated)


def rows_alone(batch: Batch, rows: Sequence[int], samples: Sequence[Sample], world: World) -> Batch:
    """A batch of these rows only, at their homes, where `samples` stand for them. Collective."""
    number = {row: place for place, row in enumerate(rows)}
    home = tuple(tuple(number[row] for row in held if row in number) for held in batch.home)
    lengths = torch.zeros(2, len(rows), dtype=torch.int64)
    for place, sample in zip(home[world.rank], samples, strict=True):
        lengths[:, place] = torch.tensor([len(sample.prompt), len(sample.response)])
    prompts, responses = sum_over_world(lengths.to(world.device), world).tolist()
    return Batch(tuple(prompts), tuple(responses), tuple(batch.groups[row] for row in rows), home, tuple(samples),
                 TokenColumns())


class ClassifierPart(_ModelPart):
    """A text classifier, whole on each rank, scores the rows at home. `offload`: it waits on the host meanwhile."""

    def __init__(self, classifier: TextClassifier, tokenizer: Tokenizer, ends: ResponseEnds, world: World, *,
                 offload: bool) -> None:
        self.classifier, self.tokenizer, self.ends, self.world = classifier, tokenizer, ends, world
        self.offload = offload

    def finish(self, asked: Asked) -> Answer:
        home = list(asked.at_home(self.world))
        texts = ((asked.prompt(row).record.prompt, answer_text(self.tokenizer, sample.response, self.ends))
                 for row, sample in home)
        read = [self.classifier.read(prompt, response) for prompt, response in texts]
        with self._in_place():
            scores = self.classifier.score([text for text, _ in read]).tolist()
        return Answer({row: model_outcome(score) for (row, _), score in zip(home, scores, strict=True)},
                      sum(cut for _, cut in read))

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        if not self.offload:
            yield
            return
        self.classifier.to(self.world.device)
        try:
            yield
        finally:
            self.classifier.to(torch.device("cpu"))
