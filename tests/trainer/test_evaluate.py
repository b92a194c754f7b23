"""Evaluations: greedy by default, else several answers with votes, alike on every rank, and every answer kept if asked.
"""

import math
from contextlib import nullcontext

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.config.load import load_config
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.records import PromptRecord
from hybridflow.generation.records import SamplingParams
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.observe.metric_names import check_names
from hybridflow.parallel.world import World
from hybridflow.trainer.evaluate import Evaluator, answer_lines, evaluation_sampling, reported_vote
from hybridflow.trainer.rollout import Rollout
from tests.ranks import run_ranks

PROMPTS = [TokenisedPrompt(7, (1, 2), PromptRecord("a", "2 + 3 =", "5")),
           TokenisedPrompt(9, (1, 3), PromptRecord("b", "1 + 1 =", "2"))]
ANSWERS = ((5, 5, 6, 7), (2, 3, 4, 8))  # of each prompt; 8 is one that no reward could be found for


class Timer:
    def phase(self, phase):
        return nullcontext()


class Asker:
    """Rows are dealt out over the ranks, the last one first."""

    timer = Timer()

    def __init__(self, world):
        self.world, self.asked = world, []

    def sample(self, prompts, params, samples):
        self.asked.append((params.temperature, samples))
        rows = range(len(prompts) * samples)
        home = tuple(tuple(rows[rank::self.world.size]) for rank in reversed(range(self.world.size)))
        mine = tuple(Sample((1,), (ANSWERS[row // samples][row % samples],)) for row in home[self.world.rank])
        return Rollout(Batch((1,) * len(rows), (1,) * len(rows), tuple(row // samples for row in rows), home, mine,
                             TokenColumns()), len(rows), (0,) * len(rows))


class Judgement:
    """What `Rewards.score` says, when it is asked for."""

    def __init__(self, rewards, batch, prompts):
        self.rewards, self.batch, self.prompts = rewards, batch, prompts

    def work(self):
        pass

    def result(self, crew):
        return self.rewards.score(self.batch, self.prompts)


class Rewards:
    """The right answer is the ground truth; even answers report what they come to."""

    right_score, last_fault = 1.0, None

    def __init__(self, world):
        self.world, self.last_extras = world, {}

    def ask(self, batch, prompts, early=None, crew=None):
        return Judgement(self, batch, prompts)

    def score(self, batch, prompts):
        samples = batch.num_rows // len(prompts)
        answers = [ANSWERS[row // samples][row % samples] for row in range(batch.num_rows)]
        elsewhere = batch.home[(self.world.rank + 1) % self.world.size]  # a rank may score rows that others keep
        self.last_extras = {row: {"pred": "even"} if answers[row] % 2 == 0 else {} for row in elsewhere}
        scores = [math.nan if answer == 8 else float(str(answer) == prompts[batch.groups[row]].record.ground_truth)
                  for row, answer in enumerate(answers)]
        return torch.tensor(scores, dtype=torch.float64), {}


def evaluate(world, samples=4, **options):
    asker = Asker(world)
    evaluator = Evaluator(asker, Rewards(world), PROMPTS, SamplingParams(1, temperature=0.5), samples,
                          lambda response: f" {response[0]}\n", **options)
    return evaluator(), evaluator, asker.asked


SINGLE = World.single(torch.device("cpu"))


def test_one_answer_is_scored_as_it_was():
    metrics, evaluator, asked = evaluate(SINGLE, samples=1)
    check_names(metrics)
    assert metrics == {"eval/faults": 0.0, "eval/accuracy": 1.0, "eval/reward_mean": 1.0, "eval/a/mean@1": 1.0,
                       "eval/b/mean@1": 1.0}
    assert asked == [(0.5, 1)] and evaluator.answers == ()


def test_votes_are_what_the_reward_reports_else_the_text():
    metrics, _, _ = evaluate(SINGLE)
    check_names(metrics)
    assert metrics["eval/faults"] == 1.0 and metrics["eval/accuracy"] == metrics["eval/reward_mean"] == 3 / 7
    assert metrics["eval/a/mean@4"] == 0.5 and metrics["eval/a/best@4"] == 1.0 and metrics["eval/a/maj@4"] == 1.0
    # b has 3 answers with a reward, two of which report "even": one right, one wrong
    assert metrics["eval/b/best@2"] == pytest.approx(2 / 3) and metrics["eval/b/maj@2"] == pytest.approx(1 / 3)
    assert "eval/b/best@4" not in metrics and metrics["eval/best@4"] == 1.0
    assert not any("redrawn" in name for name in metrics)
    assert "eval/a/maj_redrawn@4" in evaluate(SINGLE, redrawn=True)[0]


def test_answers_are_kept_if_asked():
    _, evaluator, _ = evaluate(SINGLE, keeps_answers=True)
    lines = answer_lines(evaluator.answers)
    assert len(lines) == 8 and lines[2] == {"data_source": "a", "prompt": "2 + 3 =", "ground_truth": "5", "sample": 2,
                                            "answer": " 6\n", "vote": "even", "reward": 0.0}
    assert lines[0]["vote"] == "5" and lines[7]["reward"] is None


def on_ranks(world):
    metrics, evaluator, _ = evaluate(world, keeps_answers=True)
    return metrics, evaluator.answers


def test_every_rank_says_the_same():
    alone = on_ranks(SINGLE)
    for told in run_ranks(4, on_ranks):
        assert told == alone


def test_without_prompts_nothing_is_asked():
    evaluator = Evaluator(Asker(SINGLE), Rewards(SINGLE), (), SamplingParams(1), 1, str)
    assert evaluator() == {} and evaluator.asker.asked == []


def test_what_a_reward_function_reports():
    assert reported_vote({}) is reported_vote({"pred": None}) is None
    assert reported_vote({"pred": 3}) == reported_vote({"extracted": "3", "score": 1}) == "3"


def test_sampling_is_the_evaluations_with_generations_lengths():
    generation = SamplingParams(9, 2, 1.5, 0.7, 5, 0.5, 0.1, (2,))
    greedy = evaluation_sampling(load_config({}).evaluation, generation)
    assert (greedy.temperature, greedy.top_k, greedy.top_p, greedy.min_p) == (0.0, 0, 1.0, 0.0)
    assert (greedy.max_new_tokens, greedy.min_new_tokens, greedy.repetition_penalty) == (9, 2, 1.5)
    own = load_config({}, ["evaluation={temperature: 0.6, top_k: 3, top_p: 0.9, min_p: 0.05}"]).evaluation
    sampled = evaluation_sampling(own, generation)
    assert (sampled.temperature, sampled.top_k, sampled.top_p, sampled.min_p) == (0.6, 3, 0.9, 0.05)
