"""Held-out prompts answered and scored: greedily once, or several times at a temperature.

Owns the asking and who votes for what. What rewards and votes say of a model is `held_out_scores`'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any, Protocol

from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config.data_schema import EvaluationConfig
from hybridflow.crew import Crew
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.records import prompt_text
from hybridflow.exchange import share_json
from hybridflow.generation.records import SamplingParams
from hybridflow.observe.phases import Phase, PhaseTimer
from hybridflow.parallel.world import World
from hybridflow.response_text import answer_text
from hybridflow.rewards.reasoning import extract_answer
from hybridflow.trainer.board import Metrics
from hybridflow.trainer.held_out_scores import PromptAnswers, held_out_metrics
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.judging import RewardSource, judged
from hybridflow.trainer.rollout import Rollout

# What a reward function may report, beside its score, as what an answer comes to (verl's name, and a plain one).
VOTE_KEYS = ("pred", "extracted")


class Asker(Protocol):
    """The model as it answers, with all ranks together: the actor's `Sampler`, or a model that is not trained."""

    timer: PhaseTimer

    @property
    def world(self) -> World: ...

    def sample(self, prompts: Sequence[TokenisedPrompt], params: SamplingParams, samples: int) -> Rollout: ...


@dataclass(frozen=True)
class HeldOutAnswer:
    """One answer, as evaluations.jsonl has it. `reward` is None where the reward failed."""

    data_source: str
    prompt: str
    ground_truth: str
    sample: int
    answer: str
    vote: str
    reward: float | None


class Evaluator:
    """Asks the current model. Collective; every rank has the same prompts and gets the same metrics.

    Attributes:
        answers: of the last evaluation, in order of the prompts, where they are kept; the same on every rank.
    """

    def __init__(self, asker: Asker, rewards: RewardSource, prompts: Sequence[TokenisedPrompt],
                 sampling: SamplingParams, samples: int, text: Callable[[Sequence[int]], str], *,
                 keeps_answers: bool = False, redrawn: bool = False) -> None:
        """
        Args:
            sampling, samples: of the answers, and how many to each prompt.
            text: a response in words.
            redrawn: whether best@k and maj@k of draws with replacement are wanted too (see `held_out_scores`).
        """
        self.asker, self.rewards, self.prompts = asker, rewards, prompts
        self.sampling, self.samples, self.text = sampling, samples, text
        self.keeps_answers, self.redrawn = keeps_answers, redrawn
        self.answers: tuple[HeldOutAnswer, ...] = ()

    def __call__(self) -> Metrics:
        """Mean reward, the share of right answers where an answer can be right, and `held_out_metrics` under eval/; {}
        without prompts.

        Rows whose reward failed are counted and are in no mean.
        """
        if not self.prompts:
            return {}
        with self.asker.timer.phase(Phase.EVALUATE):
            rollout = self.asker.sample(self.prompts, self.sampling, self.samples)
            scores, _ = judged(self.rewards, rollout.batch, self.prompts, Crew.whole(self.asker.world))
            told = self._told(rollout.batch)
        self.answers = tuple(self._answers(told, scores)) if self.keeps_answers else ()
        return self._plain(scores) | {f"eval/{name}": value for name, value in self._of_prompts(told, scores).items()}

    def _plain(self, scores: Tensor) -> Metrics:
        known = scores[~scores.isnan()]
        metrics = {"eval/faults": float(len(scores) - len(known))}
        if not len(known):
            return metrics
        if self.rewards.right_score is not None:
            metrics["eval/accuracy"] = (known >= self.rewards.right_score).double().mean().item()
        return metrics | {"eval/reward_mean": known.mean().item()}

    def _of_prompts(self, told: Sequence[tuple[str, str]], scores: Tensor) -> Metrics:
        rewards, votes = scores.tolist(), [vote for vote, _ in told] or [""] * len(scores)
        cut = [slice(start, start + self.samples) for start in range(0, len(rewards), self.samples)]
        answers = [PromptAnswers(prompt.record.data_source, tuple(rewards[rows]), tuple(votes[rows]))
                   for prompt, rows in zip(self.prompts, cut, strict=True)]
        return held_out_metrics(answers, self.samples, redrawn=self.redrawn)

    def _told(self, batch: Batch) -> list[tuple[str, str]]:
        """What each answer votes for, and its text where that is kept, in order; nothing where neither is looked at.

        An answer votes for what the reward function reports, else for what stands in its last `<answer>...</answer>`,
        else for all of it, without white space around it.
        """
        if self.samples == 1 and not self.keeps_answers:
            return []
        world, mine = self.asker.world, []
        for row, sample in zip(batch.home[world.rank], batch.samples, strict=True):
            text = self.text(sample.response)
            mine.append((row, extract_answer(text), text if self.keeps_answers else ""))
        given = [(row, vote) for row, extras in self.rewards.last_extras.items()
                 if (vote := reported_vote(extras)) is not None]
        told = share_json(world, [mine, given])
        by_row = {row: (vote, text) for rows, _ in told for row, vote, text in rows}
        reported = {row: vote for _, votes in told for row, vote in votes}
        return [(reported.get(row, by_row[row][0]), by_row[row][1]) for row in range(batch.num_rows)]

    def _answers(self, told: Sequence[tuple[str, str]], scores: Tensor) -> list[HeldOutAnswer]:
        records = [prompt.record for prompt in self.prompts for _ in range(self.samples)]
        return [HeldOutAnswer(record.data_source, prompt_text(record.prompt), record.ground_truth, row % self.samples,
                              text, vote, reward if isfinite(reward) else None)
                for row, (record, (vote, text), reward) in enumerate(zip(records, told, scores.tolist(), strict=True))]


def reported_vote(extras: Mapping[str, Any]) -> str | None:
    """What a reward function reports under one of `VOTE_KEYS`; None where it reports nothing."""
    return next((str(extras[key]) for key in VOTE_KEYS if extras.get(key) is not None), None)


def evaluation_sampling(evaluation: EvaluationConfig, sampling: SamplingParams) -> SamplingParams:
    """How held-out prompts are answered; lengths, ends and the repetition penalty are those of `sampling`."""
    return replace(sampling, temperature=evaluation.temperature, top_k=evaluation.top_k, top_p=evaluation.top_p,
                   min_p=evaluation.min_p)


def make_evaluator(inputs: Inputs, asker: Asker, rewards: RewardSource, prompts: Sequence[TokenisedPrompt],
                   sampling: SamplingParams) -> Evaluator:
    """What asks `prompts` as the config's evaluation block says; `sampling` is that of generation."""
    evaluation = inputs.config.evaluation
    return Evaluator(asker, rewards, prompts, evaluation_sampling(evaluation, sampling), evaluation.samples_per_prompt,
                     lambda response: answer_text(inputs.tokenizer, response, inputs.ends),
                     keeps_answers=evaluation.save_answers, redrawn=inputs.config.logging.verl_names)


def answer_lines(answers: Sequence[HeldOutAnswer]) -> list[dict[str, Any]]:
    """The answers as evaluations.jsonl has them."""
    return [asdict(answer) for answer in answers]
