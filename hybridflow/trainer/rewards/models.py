"""Reward models: decoders of ours on a mesh, and whole text classifiers on each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from hybridflow.batch import Batch
from hybridflow.crew import Crew
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.records import Prompt
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.models.text_classifier import TextClassifier
from hybridflow.parallel.world import World
from hybridflow.response_text import ResponseEnds, answer_text
from hybridflow.trainer.rewards.part import Answer, Asked, model_outcome
from hybridflow.trainer.roles import RowScores, ScoringRole
from hybridflow.trainer.turns import Said


class _ModelPart:
    """What both kinds share: they begin when their batch is whole, and no answer is simply right."""

    right_score: float | None = None

    def submit(self, key: int, row: int, prompt: TokenisedPrompt, response: Sequence[int],
               spoken: Said | None = None) -> None:
        """Rows are scored together."""

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

    def ask(self, asked: Asked) -> DecoderJudgement | RereadJudgement:
        if self.rereader is None:
            home = list(asked.at_home(self.world))
            lengths = [(asked.batch.prompt_lengths[row], asked.batch.response_lengths[row]) for row in asked.rows]
            batch = rows_alone(asked, [sample for _, sample in home], lengths)
            return DecoderJudgement(asked, [row for row, _ in home], self.role.ask_rows(batch) if asked.rows else None)
        return RereadJudgement(self.role, self.rereader, asked, self.world)


class DecoderJudgement:
    """Rows on their way to a decoder; `scores` is None where there are none. `home`: those of this rank."""

    def __init__(self, asked: Asked, home: Sequence[int], scores: RowScores | None) -> None:
        self._asked, self._home, self._scores = asked, home, scores

    def work(self) -> None:
        if self._scores is not None:
            self._scores.work()

    def answer(self, crew: Crew) -> Answer:
        if self._scores is None:
            return Answer({})
        by_row = dict(zip(self._asked.rows, self._scores.result(crew).tolist(), strict=True))
        return Answer({row: model_outcome(by_row[row]) for row in self._home})


class RereadJudgement:
    """Rows that are encoded anew. Only then do ranks know their lengths, so that all is done in `answer`."""

    def __init__(self, role: ScoringRole, rereader: Rereader, asked: Asked, world: World) -> None:
        self._role, self._asked = role, asked
        self._home = [row for row, _ in asked.at_home(world)]
        self._read = [rereader.sample(asked.prompt(row), sample.response) for row, sample in asked.at_home(world)]

    def work(self) -> None:
        """Nobody can before lengths are known."""

    def answer(self, crew: Crew) -> Answer:
        if not self._asked.rows:
            return Answer({})
        samples, place_of = [sample for sample, _ in self._read], {row: i for i, row in enumerate(self._asked.rows)}
        lengths = torch.zeros(len(place_of), 2, dtype=torch.int64)
        for row, sample in zip(self._home, samples):
            lengths[place_of[row]] = torch.tensor([len(sample.prompt), len(sample.response)])
        lengths = crew.sum(lengths.to(crew.world.device)).tolist()
        judgement = DecoderJudgement(self._asked, self._home,
                                     self._role.ask_rows(rows_alone(self._asked, samples, lengths)))
        judgement.work()
        return replace(judgement.answer(crew), num_truncated=sum(cut for _, cut in self._read))


def rows_alone(asked: Asked, samples: Sequence[Sample], lengths: Sequence[Sequence[int]]) -> Batch:
    """A batch of the wanted rows only, at their homes.

    Args:
        samples: what stands for those at home here.
        lengths: of every wanted row, in tokens: prompt, response.
    """
    number = {row: place for place, row in enumerate(asked.rows)}
    home = tuple(tuple(number[row] for row in held if row in number) for held in asked.batch.home)
    prompts, responses = tuple(length[0] for length in lengths), tuple(length[1] for length in lengths)
    return Batch(prompts, responses, tuple(asked.batch.groups[row] for row in asked.rows), home, tuple(samples),
                 TokenColumns())


class ClassifierPart(_ModelPart):
    """A text classifier, whole on each rank, scores the rows at home. `offload`: it waits on the host meanwhile."""

    def __init__(self, classifier: TextClassifier, tokenizer: Tokenizer, ends: ResponseEnds, world: World, *,
                 offload: bool) -> None:
        self.classifier, self.tokenizer, self.ends, self.world = classifier, tokenizer, ends, world
        self.offload = offload

    def ask(self, asked: Asked) -> ClassifierJudgement:
        texts = [(row, asked.prompt(row).record.prompt, answer_text(self.tokenizer, sample.response, self.ends))
                 for row, sample in asked.at_home(self.world)]
        return ClassifierJudgement(self, texts)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The classifier has its turn on the device."""
        if not self.offload:
            yield
            return
        self.classifier.to(self.world.device)
        try:
            yield
        finally:
            self.classifier.to(torch.device("cpu"))


class ClassifierJudgement:
    """Texts at home here: (row, prompt, answer)."""

    def __init__(self, part: ClassifierPart, texts: Sequence[tuple[int, Prompt, str]]) -> None:
        self._part, self._texts = part, texts
        self._answer = Answer({})

    def work(self) -> None:
        classifier = self._part.classifier
        read = [classifier.read(prompt, answer) for _, prompt, answer in self._texts]
        with self._part.in_place():
            scores = classifier.score([encoded for encoded, _ in read]).tolist()
        self._answer = Answer({row: model_outcome(score) for (row, _, _), score in zip(self._texts, scores)},
                              sum(cut for _, cut in read))

    def answer(self, crew: Crew) -> Answer:
        return self._answer
