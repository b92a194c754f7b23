"""Scores of a reward function as every rank sees them, and what the user is told when it fails."""

from pathlib import Path

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.crew import Crew
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.records import PromptRecord
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.parallel.world import World
from hybridflow.response_text import ResponseEnds, answer_text
from hybridflow.rewards.function import RewardFunction
from hybridflow.trainer.judging import judged
from hybridflow.trainer.reward_source import FunctionRewards
from tests.ranks import run_ranks

END = 0
PROMPTS = [TokenisedPrompt(row, (5,), PromptRecord(f"set {row}", "?", "ab")) for row in range(3)]
FUNCTION = '''
def score(data_source, solution_str, ground_truth, extra_info):
    if "x" in solution_str:
        raise ValueError("x is no\\nletter")
    return {"score": float(solution_str == ground_truth), "length": len(solution_str),
            "big": 10**400, "nan": float("nan"), "inf": float("inf"), "word": "w"}
'''


class Letters:
    """A tokenizer as far as rewards use one: token 1 is "a", 2 is "b"."""

    def decode(self, ids):
        return "".join(chr(ord("a") + token - 1) for token in ids)


def rollouts(world: World, answers: list[str]) -> Batch:
    responses = [(*(ord(letter) - ord("a") + 1 for letter in answer), END) for answer in answers]
    home = tuple(tuple(range(rank, len(answers), world.size)) for rank in range(world.size))
    samples = tuple(Sample((5,), responses[row]) for row in home[world.rank])
    return Batch((1,) * len(answers), tuple(map(len, responses)), tuple(range(len(answers))), home, samples,
                 TokenColumns())


def score_twice(world: World, spec: str) -> list[tuple]:
    rewards = FunctionRewards(RewardFunction.load(spec, timeout_s=30.0), Letters(), ResponseEnds((END,)), world)
    told = []
    for answers in (["ab", "xa", "x"], ["ab", "b", "ab"]):
        scores, metrics = judged(rewards, rollouts(world, answers), PROMPTS, Crew.whole(world))
        told.append((scores.tolist(), metrics, rewards.last_fault))
    rewards.close()
    return told


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "rule.py").write_text(FUNCTION)
    return f"{tmp_path / 'rule.py'}:score"


SINGLE = "2 of 3 rewards failed (2 raised); first: row 1 of data source 'set 1': ValueError: x is no letter (rule.py"
# Rank 0 has rows 0 and 2 of the batch, so that its row 1 is from set 2.
OF_RANK_0 = "rank 0: 1 of 2 rewards failed (1 raised); first: row 1 of data source 'set 2': ValueError: x is no letter"


def check(told: list[tuple], sentence: str) -> None:
    (failed, metrics, fault), (scores, clean, nothing) = told
    assert failed[0] == 1.0 and [score != score for score in failed] == [False, True, True]
    assert metrics["reward/faults_raised"] == 2.0 and metrics["reward/faults_crashed"] == 0.0
    assert metrics["reward/extra_length"] == 2.0  # of the one answer that could be judged
    assert [name for name in metrics if "extra" in name] == ["reward/extra_length"]  # finite numbers alone have means
    assert fault.startswith(sentence)
    assert scores == [1.0, 0.0, 1.0] and nothing is None
    assert clean["reward/faults_raised"] == 0.0 and clean["reward/extra_length"] == pytest.approx(5 / 3)


def test_a_fault_is_not_a_number_counted_and_told(spec: str):
    check(score_twice(World.single(torch.device("cpu")), spec), SINGLE)


def test_every_rank_is_told_the_same(spec: str):
    for told in run_ranks(2, score_twice, spec):
        check(told, f"2 rewards failed over all ranks; {OF_RANK_0}")


def test_the_token_that_ended_an_answer_is_not_judged():
    assert answer_text(Letters(), (1, 2, END), ResponseEnds((END, 3))) == "ab"
    assert answer_text(Letters(), (1, 2), ResponseEnds((END,))) == "ab"
    assert answer_text(Letters(), (), ResponseEnds((END,))) == ""


def test_the_string_that_ended_an_answer_is_not_judged():
    ends = ResponseEnds((END,), ("bc", "cd"))
    assert answer_text(Letters(), (1, 2, 3), ends) == "a"
    assert answer_text(Letters(), (1, 2, 3, 1), ends) == "abca"  # it stands there since before, so it did not end this
    assert answer_text(Letters(), (1, 2, END), ends) == "ab"
    assert answer_text(Letters(), (), ends) == ""
