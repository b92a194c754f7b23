"""The keys of the reward block as they reach what scores."""

from pathlib import Path

import pytest

from hybridflow.config.load import load_config
from hybridflow.rewards.records import FaultKind, RewardRequest, RowFault
from hybridflow.trainer.rewards.inputs import RewardInput, read_rewards
from tests.models.tiny_classifiers import deberta, gpt2
from tests.trainer.rewards.batches import Letters

FOLDER = Path(__file__).parents[2] / "rewards"


def parts(*overrides: str) -> tuple[RewardInput, ...]:
    return read_rewards(load_config({}, overrides), Letters(), 8)


def outcomes(part: RewardInput, *solutions: str) -> tuple[list[float], list[RowFault | None]]:
    result = part.scorer.score([RewardRequest("chain_sum", solution, "12", {"index": 0}) for solution in solutions])
    part.scorer.close()
    return result.scores.tolist(), list(result.row_faults)


def test_limits_and_actions():
    (part,) = parts(f"reward.function={FOLDER}/unruly.py:hungry", "reward.memory_mb=256",
                    "reward.on_fault.out_of_memory=-1")
    _, (fault, fine) = outcomes(part, "bytes", "a")
    assert fault.kind is FaultKind.OUT_OF_MEMORY and part.policy.value(fault) == -1.0 and fine is None
    (part,) = parts(f"reward.function={FOLDER}/functions.py:score", "reward.timeout_s=0.5",
                    "reward.on_fault.timed_out=error")
    _, (fault,) = outcomes(part, "spin")
    assert fault.kind is FaultKind.TIMED_OUT and part.policy.ends_run(fault)


def test_workers_and_batches():
    (part,) = parts(f"reward.function={FOLDER}/functions.py:worker_id", "reward.workers=2")
    assert len(set(outcomes(part, *"abcd")[0])) == 2
    (part,) = parts(f"reward.function={FOLDER}/signatures.py:anything", "reward.batched=true")
    assert outcomes(part, "a", "b")[0] == [1.0, 1.0]
    (part,) = parts(f"reward.function={FOLDER}/signatures.py:anything")
    assert outcomes(part, "a", "b")[0] == [0.25, 0.25]


def test_keys_that_no_scorer_reads(tmp_path: Path):
    lists, single = (f"{FOLDER}/signatures.py:anything", f"{FOLDER}/functions.py:score")
    with pytest.raises(ValueError, match="reward.workers = 2: has no effect with a function that takes lists"):
        parts(f"reward.function={lists}", "reward.batched=true", "reward.workers=2")
    with pytest.raises(ValueError, match="reward.workers = 2: has no effect"):  # its signature says so
        parts(f"reward.function={FOLDER}/signatures.py:compute_score_batched", "reward.workers=2")
    for part in parts(f"reward.mixture=[{{name: a, function: '{FOLDER}/signatures.py:compute_score_batched'}}, "
                      f"{{name: b, function: '{single}'}}]", "reward.workers=2"):
        part.scorer.close()
    keys = ("model.reward_model.micro_batch_size=2", "reward.function=null")
    with pytest.raises(ValueError, match="reward_model.micro_batch_size = 2: has no effect with .*gpt2, whose token"):
        parts(f"model.reward_model.path={gpt2(tmp_path / 'gpt2')}", *keys)
    assert len(parts(f"model.reward_model.path={deberta(tmp_path / 'deberta')}", *keys)) == 1


def test_parts_of_a_mixture():
    first, second = parts(
        f"reward.mixture=[{{name: a, weight: 2, function: '{FOLDER}/functions.py:score', data_sources: [chain_sum], "
        "on_fault: {raised: 3}}, {name: b, weight: -1, reasoning_gym: exact}]", "reward.on_fault.raised=zero")
    assert (first.name, first.weight, first.data_sources) == ("a", 2.0, {"chain_sum"})
    assert (second.name, second.weight, second.data_sources) == ("b", -1.0, frozenset())
    scores, (fault, _) = outcomes(first, "raise", "12")
    assert scores[1] == 1.0 and first.policy.value(fault) == 3.0 and second.policy.value(fault) == 0.0
    assert outcomes(second, "12", "13")[0] == [1.0, 0.0]
