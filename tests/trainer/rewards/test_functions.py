"""Scores of reward functions as every rank sees them: faults, policies, mixtures, rows handed in early."""

from pathlib import Path

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.config.reward_schema import OnFaultConfig
from hybridflow.crew import Crew
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.parallel.world import World
from hybridflow.response_text import ResponseEnds, answer_text
from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.policy import Consequence, FaultPolicy, RewardFailed
from hybridflow.rewards.records import FaultKind
from hybridflow.trainer.rewards.functions import FunctionPart
from hybridflow.trainer.rewards.inputs import RewardInput, fault_policy, require_parts
from hybridflow.trainer.rewards.source import EarlyRows, Rewards, WeightedPart
from tests.ranks import run_ranks
from tests.trainer.rewards.batches import END, Letters, prompts, rollouts

RULES = Path(__file__).with_name("rules.py")
DROP = FaultPolicy({})
ALONE = World.single(torch.device("cpu"))


def score(rewards: Rewards, world: World, batch: Batch, asked: list[TokenisedPrompt],
          early: EarlyRows | None = None) -> tuple[torch.Tensor, dict[str, float]]:
    crew = Crew.whole(world)
    judgement = rewards.ask(batch, asked, early, crew)
    judgement.work()
    return judgement.result(crew)


def part(world: World, function: str, policy: FaultPolicy = DROP, *place) -> WeightedPart:
    loaded = RewardFunction.load(f"{RULES}:{function}", timeout_s=30.0)
    return WeightedPart(FunctionPart(loaded, Letters(), ResponseEnds((END,)), world), policy, *place)


def shown(scores: torch.Tensor) -> list[float | None]:
    return [None if score != score else score for score in scores.tolist()]


def score_twice(world: World) -> list[tuple]:
    rewards = Rewards([part(world, "score")])
    told = []
    for answers in (["ab", "xa", "x"], ["ab", "b", "ab"]):
        scores, metrics = score(rewards, world, rollouts(world, answers), prompts(3))
        told.append((shown(scores), metrics, rewards.last_fault))
    rewards.close()
    return told


def test_a_fault_is_not_a_number_counted_and_told_alike_on_every_rank():
    for told in (score_twice(ALONE), *run_ranks(2, score_twice)):
        (failed, metrics, fault), (scores, clean, nothing) = told
        assert failed == [1.0, None, None]
        assert metrics["reward/faults_raised"] == 2.0 and metrics["reward/faults_crashed"] == 0.0
        assert metrics["reward/extra_length"] == 2.0  # of the one answer that could be judged
        assert [name for name in metrics if "extra" in name] == ["reward/extra_length"]  # finite numbers have means
        assert fault == ("2 of 3 rewards failed (2 raised); first: row 1 of data source 'set 1': ValueError: "
                         "x is no letter (rules.py line 8)")
        assert scores == [1.0, 0.0, 1.0] and nothing is None
        assert clean["reward/faults_raised"] == 0.0 and clean["reward/extra_length"] == pytest.approx(5 / 3)


def test_the_words_of_the_config_are_policies():
    assert {field for field in vars(OnFaultConfig())} == {kind.value for kind in FaultKind}
    policy = fault_policy(OnFaultConfig(raised="zero", timed_out="error", crashed=-2))
    assert dict(policy.actions) == {
        FaultKind.RAISED: 0.0, FaultKind.TIMED_OUT: Consequence.ERROR, FaultKind.NOT_FINITE: Consequence.DROP,
        FaultKind.WRONG_TYPE: Consequence.DROP, FaultKind.CRASHED: -2.0, FaultKind.OUT_OF_MEMORY: Consequence.DROP}


def score_by_policy(world: World) -> tuple:
    policy = FaultPolicy({FaultKind.RAISED: -0.5, FaultKind.NOT_FINITE: Consequence.ERROR})
    rewards = Rewards([part(world, "score", policy)])
    batch = rollouts(world, ["ab", "x", "b"])
    scores, metrics = score(rewards, world, batch, prompts(3))
    fault = rewards.last_fault
    try:
        score(rewards, world, rollouts(world, ["ab", "x", "b", "n", "n"]), prompts(5))
    except RewardFailed as error:
        return shown(scores), metrics["reward/faults_raised"], fault, str(error)
    finally:
        rewards.close()
    raise AssertionError("the run goes on")


def test_a_policy_gives_a_number_which_is_still_told_or_ends_the_run_on_every_rank():
    for scores, faults, fault, error in (score_by_policy(ALONE), *run_ranks(2, score_by_policy)):
        assert scores == [1.0, -0.5, 0.0] and faults == 1.0 and "1 raised" in fault
        assert error == ("the reward of row 3 (data source 'set 3') failed, and reward.on_fault ends the run: "
                         "the score is nan")


def score_mixed(world: World) -> tuple:
    parts = [part(world, "score", DROP, "right", 2.0, frozenset({"sums"})),
             part(world, "brevity", FaultPolicy({FaultKind.RAISED: -9.0}), "short", 0.5),
             part(world, "together", DROP, "number", 0.0)]
    rewards = Rewards(parts)
    asked = prompts(5, "sums", "words")
    scores, metrics = score(rewards, world, rollouts(world, ["ab", "ab", "x", "zz", "bn"]), asked)
    rewards.close()
    return shown(scores), metrics, rewards.last_fault, rewards.right_score


def test_a_mixture_is_a_weighted_sum_of_parts_with_policies_and_data_sources_of_their_own():
    for scores, metrics, fault, right in (score_mixed(ALONE), *run_ranks(2, score_mixed)):
        # right (weight 2) has rows 0, 2, 4; short (0.5) is -tokens; number has no weight and drops no row.
        assert scores == [2.0 - 1.5, -1.5, None, -4.5, None]
        assert metrics["reward/part_short"] == pytest.approx((-3 - 3 - 2 - 9 - 3) / 5)
        assert metrics["reward/faults_raised"] == 2.0
        assert "reward part right: 2 of 3 rewards failed (1 raised, 1 not_finite); first: row 2" in fault
        assert "reward part short: 1 of 5 rewards failed (1 raised); first: row 3" in fault
        assert right is None


def test_a_data_source_without_a_part_is_an_error():
    rewards = Rewards([part(ALONE, "score", DROP, "right", 1.0, frozenset({"sums"}))])
    with pytest.raises(ValueError, match="no part scores the data source 'words' .row 1."):
        score(rewards, ALONE, rollouts(ALONE, ["ab", "ab"]), prompts(2, "sums", "words"))
    rewards.close()


def score_batched(world: World) -> tuple:
    rewards = Rewards([part(world, "together")])
    scores, metrics = score(rewards, world, rollouts(world, ["ab", "n", "b", "a"]), prompts(4))
    whole, _ = score(rewards, world, rollouts(world, ["ab", "a"]), prompts(2, "raise"))
    rewards.close()
    return shown(scores), metrics["reward/faults_not_finite"], shown(whole), rewards.last_fault


def test_a_batched_function_is_called_once_a_rank():
    assert score_batched(ALONE)[:3] == ([4.0, None, 4.0, 4.0], 1.0, [None, None])
    for told in run_ranks(2, score_batched):
        assert told[:3] == ([2.0, None, 2.0, 2.0], 1.0, [None, None])
        assert "2 of 2 rewards failed (2 raised)" in told[3]


def score_early(world: World) -> tuple:
    """Rank 0 hands in rows 0 to 3 beforehand, of which it keeps half; the others are scored where they are kept."""
    rewards = Rewards([part(world, "slow"), part(world, "together", DROP, "all", 0.0)])
    answers = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff"]
    batch, asked = rollouts(world, answers), prompts(6)
    early, other = rewards.begin(), rewards.begin()
    for row in range(4 if world.rank == 0 else 0):
        early.submit(row, asked[row], (*range(1, row + 2), END))
        other.submit(row, asked[row], (1, END))
    scores, metrics = score(rewards, world, batch, asked, early)
    again, _ = score(rewards, world, batch, asked, other)
    plain, _ = score(rewards, world, batch, asked)
    rewards.close()
    return scores.tolist(), again.tolist(), plain.tolist(), metrics["reward/part_all"]


def test_rows_may_be_handed_in_while_others_are_generated_on_any_rank():
    for size, ranks in ((1, [score_early(ALONE)]), (2, run_ranks(2, score_early))):
        for early, other, plain, together in ranks:
            assert early == plain == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
            assert other == [1.0, 1.0, 1.0, 1.0, 5.0, 6.0]  # it was told apart from the batch beside it
            assert together == (6.0 if size == 1 else pytest.approx((5 * 5 + 1) / 6))


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


def test_every_data_source_has_a_part_before_ranks_meet():
    function = RewardFunction.load(f"{RULES}:score", timeout_s=30.0)
    parts = [RewardInput(function, DROP, "a", 1.0, frozenset({"sums"})),
             RewardInput(function, DROP, "b", 1.0, frozenset({"words"}))]
    require_parts(parts, ["sums", "words"], all_known=True)
    with pytest.raises(ValueError, match="no part scores the data source 'facts', 'maths'"):
        require_parts(parts, ["sums", "maths", "facts"])
    with pytest.raises(ValueError, match="'words': no row has that data source; did you mean word?"):
        require_parts(parts, ["sums", "word"], all_known=True)
    function.close()


def extras_of(world: World) -> dict[int, dict]:
    rewards = Rewards([part(world, "score", DROP, "right"), part(world, "voted", DROP, "vote")])
    score(rewards, world, rollouts(world, ["ab", "x", "b"]), prompts(3))
    rewards.close()
    return {row: {name: extras[name] for name in ("pred", "length", "word") if name in extras}
            for row, extras in rewards.last_extras.items()}


def test_what_functions_return_beside_scores_is_kept_by_row_for_evaluations():
    wanted = {0: {"pred": "AB", "length": 2, "word": "w"}, 1: {"pred": "X", "length": -1},
              2: {"pred": "B", "length": 1, "word": "w"}}
    assert extras_of(ALONE) == wanted
    first, second = run_ranks(2, extras_of)
    assert first == {0: wanted[0], 2: wanted[2]} and second == {1: wanted[1]}
