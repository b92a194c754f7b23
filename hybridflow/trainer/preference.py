"""Preference training: a model on pairs or on good and bad answers, one optimizer step at a time.

Each step is a few lines: what the frozen reference says of the rows, then the update. The two rows of a pair are in one
micro-batch (`ScoringRole.share`), and what a loss divides by is counted over the whole optimizer batch, so that no cut
changes a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hybridflow.algorithms.kto import reference_point
from hybridflow.algorithms.preference import Counts, RowLoss, ranking_accuracy
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.preference import LabelledExample, PairExample
from hybridflow.engine.native import Update
from hybridflow.observe.phases import Phase
from hybridflow.parallel.world import World
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.offline import Learner, Metrics, OfflineTrainer
from hybridflow.trainer.preference_objective import bradley_terry_objective, dpo_objective, kto_objective
from hybridflow.trainer.preference_update import (
    label_samples,
    learn_log_ratios,
    learn_scores,
    log_ratio_loss_of,
    mismatched_samples,
    num_tokens,
    pair_margins,
    pair_samples,
    score_loss_of,
)
from hybridflow.trainer.reference import Reference
from hybridflow.trainer.row_numbers import response_log_probs, row_scores

Example = TypeVar("Example", PairExample, LabelledExample)


class PreferenceTrainer(OfflineTrainer, ABC, Generic[Example]):
    """The base: steps, and the evaluation on `held_out` examples, which are the same on every rank."""

    area = "preference"

    def __init__(self, inputs: Inputs, world: World, make_actor: Learner, held_out: Sequence[Example]) -> None:
        super().__init__(inputs, world, make_actor)
        self.held_out = tuple(held_out)

    def step(self, examples: Sequence[Example]) -> Metrics:
        """One optimizer step on `examples`, the same on every rank."""
        with self.timer.step():
            update, told, num_tokens = self.learn(examples)
        means = {f"preference/{name}": value for name, value in update.sums.items()}
        return self.update_metrics(update, num_tokens) | means | told

    @abstractmethod
    def learn(self, examples: Sequence[Example]) -> tuple[Update, Metrics, int]:
        """The update, further metrics, and the tokens of its rows."""

    @abstractmethod
    def judge(self, examples: Sequence[Example]) -> Metrics:
        """What the current model makes of `examples`: metrics by the last part of their names."""

    def evaluator(self, prompts: Sequence[TokenisedPrompt]) -> Callable[[], Metrics]:
        """What judges the held-out examples, and asks the actor `prompts`, where there are any."""
        asks = super().evaluator(prompts) if prompts else None

        def evaluate() -> Metrics:
            with self.timer.phase(Phase.EVALUATE):
                told = self.judge(self.held_out) if self.held_out else {}
                answered = {} if asks is None else asks()
            return {f"eval/preference_{name}": value for name, value in told.items()} | answered
        return evaluate


class RewardModelTrainer(PreferenceTrainer[PairExample]):
    """A score head that learns which answer is preferred."""

    def __init__(self, inputs: Inputs, world: World, held_out: Sequence[PairExample]) -> None:
        steps = inputs.config.preference.steps
        super().__init__(inputs, world, lambda builder: builder.scorer(steps), held_out)
        self.objective = bradley_terry_objective(inputs.config)

    def learn(self, examples: Sequence[PairExample]) -> tuple[Update, Metrics, int]:
        samples, margins = pair_samples(examples), pair_margins(examples)
        loss = partial(score_loss_of, self.objective, Counts(len(examples)))
        with self.timer.phase(Phase.UPDATE_ACTOR):
            update = learn_scores(self.actor, samples, margins, loss)
        return update, {}, num_tokens(samples)

    def judge(self, examples: Sequence[PairExample]) -> Metrics:
        scores = row_scores(self.actor, pair_samples(examples))
        margins = torch.tensor(pair_margins(examples), dtype=scores.dtype, device=scores.device)
        return _numbers(self.objective, scores, margins, Counts(len(examples)))


class DpoTrainer(PreferenceTrainer[PairExample]):
    """A language model that learns from pairs, near its frozen start."""

    def __init__(self, inputs: Inputs, world: World, held_out: Sequence[PairExample],
                 every: Callable[[], Sequence[PairExample]]) -> None:
        """`every` gives all training examples, which are asked for where the reference is precomputed."""
        preference = inputs.config.preference
        super().__init__(inputs, world, lambda builder: builder.actor(preference.steps, temperature=1.0), held_out)
        self.objective, self.nll_coef = dpo_objective(inputs.config), preference.nll_coef
        self.reference = Reference(self.builder.reference())
        self.held_out_reference = self.reference.of_all(pair_samples(self.held_out))
        if preference.precompute_reference:
            examples = every()
            self.reference.precompute([example.row for example in examples], pair_samples(examples))

    def learn(self, examples: Sequence[PairExample]) -> tuple[Update, Metrics, int]:
        samples = pair_samples(examples)
        with self.timer.phase(Phase.REFERENCE):
            reference = self.reference.of([example.row for example in examples], samples)
        loss = partial(log_ratio_loss_of, self.objective, Counts(len(examples)), self.nll_coef)
        with self.timer.phase(Phase.UPDATE_ACTOR):
            trained = [place % 2 == 0 for place in range(len(samples))]  # by nll_coef
            update = learn_log_ratios(self.actor, samples, reference, torch.zeros_like(reference), loss, together=2,
                                      trained=trained)
        return update, {}, num_tokens(samples)

    def judge(self, examples: Sequence[PairExample]) -> Metrics:
        ratios = response_log_probs(self.actor, pair_samples(examples)) - self.held_out_reference
        return _numbers(self.objective, ratios, torch.zeros_like(ratios), Counts(len(examples)))


class KtoTrainer(PreferenceTrainer[LabelledExample]):
    """A language model that learns from good and bad answers, near its frozen start."""

    def __init__(self, inputs: Inputs, world: World, held_out: Sequence[LabelledExample]) -> None:
        steps = inputs.config.preference.steps
        super().__init__(inputs, world, lambda builder: builder.actor(steps, temperature=1.0), held_out)
        self.reference = Reference(self.builder.reference())
        samples = label_samples(self.held_out)
        self.held_out_reference = self.reference.of_all([*samples, *mismatched_samples(samples)])

    def learn(self, examples: Sequence[LabelledExample]) -> tuple[Update, Metrics, int]:
        samples, labels = label_samples(examples), self._labels(examples)
        others = mismatched_samples(samples)
        with self.timer.phase(Phase.REFERENCE):
            reference, reference_others = self.reference.of_all([*samples, *others]).chunk(2)
        with self.timer.phase(Phase.LOG_PROBS):
            z0 = reference_point(response_log_probs(self.actor, others), reference_others)
        counts = _label_counts(labels)
        loss = partial(log_ratio_loss_of, kto_objective(self.config, z0), counts, 0.0)
        with self.timer.phase(Phase.UPDATE_ACTOR):
            update = learn_log_ratios(self.actor, samples, reference, labels, loss)
        update = replace(update, sums=_present(update.sums, counts))
        return update, {"preference/kl": z0.item()}, num_tokens(samples)

    def judge(self, examples: Sequence[LabelledExample]) -> Metrics:
        samples, labels = label_samples(examples), self._labels(examples)
        ratios = response_log_probs(self.actor, [*samples, *mismatched_samples(samples)]) - self.held_out_reference
        ratios, others = ratios.chunk(2)
        z0 = reference_point(others, torch.zeros_like(others))
        counts = _label_counts(labels)
        told = _present(_numbers(kto_objective(self.config, z0), ratios, labels, counts), counts)
        accuracy = ranking_accuracy(ratios[labels > 0.5], ratios[labels < 0.5])
        return told | {"kl": z0.item()} | ({} if accuracy is None else {"accuracy": accuracy})

    def _labels(self, examples: Sequence[LabelledExample]) -> Tensor:
        return torch.tensor([float(example.desirable) for example in examples], dtype=torch.float64,
                            device=self.world.device)


def _numbers(objective: RowLoss, numbers: Tensor, labels: Tensor, counts: Counts) -> Metrics:
    """An objective's metrics of whole rows."""
    return {name: value.item() for name, value in objective.of_rows(numbers, labels, counts)[1].items()}


def _label_counts(labels: Tensor) -> Counts:
    return Counts(labels.numel(), int(labels.sum().item()))


def _present(sums: dict[str, float], counts: Counts) -> dict[str, float]:
    """Without the means over answers of a kind of which there are none."""
    absent = {"chosen_reward", "margin"} if counts.desirable == 0 else set()
    absent |= {"rejected_reward", "margin"} if counts.desirable == counts.terms else set()
    return {name: value for name, value in sums.items() if name not in absent}
