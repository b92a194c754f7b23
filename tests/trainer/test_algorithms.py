"""Every algorithm that a config can name takes, on ranks, the step of one process; and each of its keys changes it."""

from pathlib import Path

import pytest
import torch

from hybridflow.config.words import AlgorithmName
from hybridflow.observe.metric_names import check_names
from hybridflow.parallel.world import World
from tests.ranks import run_ranks
from tests.trainer.runs import make_tokenizer, run_steps, tiny_config
from tests.trainer.test_rl import numbers

OWN = Path(__file__).parents[1] / "algorithms" / "users_own.py"
# The base has kl in the reward and an entropy bonus; two optimizer steps a rollout, so that ratios are not 1.
OWN_KL = ("algorithm.kl={where: null, coef: 0.1}",)
CASES = {
    **{name.value: (f"algorithm.name={name.value}", *OWN_KL) for name in AlgorithmName
       if name.value not in ("ppo", "safe_rlhf")},
    "safe_rlhf": ("algorithm.name=safe_rlhf", *OWN_KL, f"cost.function={Path(__file__).with_name('costs.py')}:cost"),
    "rloo, reinforce_pp's KL": ("algorithm.name=rloo", "algorithm.kl.target=2.0"),
    "gspo_token with critic and correction": (
        "algorithm.policy_loss=gspo_token", "algorithm.correction={level: sequence, how: mask}",
        "algorithm.clip={low: 0.001, high: 0.002}"),
    "grpo, KL and length in the reward": (
        "algorithm.name=grpo", "algorithm.kl.where=reward", "algorithm.overlong_buffer=4",
        "algorithm.normalise_advantages=true", "algorithm.correction.level=token"),
    "a user's": ("algorithm.name=reinforce_pp", f"algorithm.advantage={OWN}:scaled_scores",
                 f"algorithm.policy_loss={OWN}:bounded_log_prob"),
}
LAYOUTS = [("train.layout.cp=2",), ("train.layout={tp: 1, pp: 2}", "train.micro_batch_size=3"), ("train.layout.tp=2",)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def steps_on(world: World, tokenizer: Path, folder: Path, overrides: tuple[str, ...], steps: int) -> list:
    return run_steps(world, tiny_config(tokenizer, folder, overrides), steps)[0]


def alone(tokenizer: Path, folder: Path, *overrides: str, steps: int = 1) -> list[dict[str, float]]:
    return steps_on(World.single(torch.device("cpu")), tokenizer, folder, overrides, steps)


@pytest.mark.parametrize("case", CASES)
def test_every_algorithm_takes_the_step_of_one_process(case: str, tokenizer: Path, tmp_path: Path):
    steps = 2 if "KL" in case else 1  # only then is the policy away from the reference when it samples
    expected = alone(tokenizer, tmp_path, *CASES[case], steps=steps)
    check_names([*expected[0]])
    assert expected[0]["policy/grad_norm"] > 0 and (steps == 1 or expected[1]["policy/kl_reference"] != 0)
    layout = LAYOUTS[0] if "gspo" in case or "grpo" in case else LAYOUTS[len(case) % 3]
    for told in run_ranks(2, steps_on, tokenizer, tmp_path, (*CASES[case], *layout), steps):
        for metrics, wanted in zip(told, expected, strict=True):
            assert numbers(metrics) == pytest.approx(numbers(wanted), rel=1e-8, abs=1e-10)


def test_keys_of_the_algorithm_change_the_step(tokenizer: Path, tmp_path: Path):
    base = ("algorithm.name=reinforce_pp", "train.mixed_precision=no")
    [plain] = alone(tokenizer, tmp_path, *base)
    seen = {plain["policy/grad_norm"]}
    for key in ("algorithm.advantage=grpo", "algorithm.policy_loss=reinforce", "algorithm.gamma=0.5",
                "algorithm.normalise_advantages=false", "algorithm.overlong_buffer=5",
                "algorithm.correction={level: token, how: mask, low: 1, high: 1}",
                "algorithm.correction={level: token, how: mask, low: 0.999999, high: 1}",
                "algorithm.correction={level: sequence, high: 1}"):
        [metrics] = alone(tokenizer, tmp_path, *base, key)
        assert metrics["policy/grad_norm"] not in seen, key
        seen.add(metrics["policy/grad_norm"])
        if "correction" in key:  # the generator's kernels round otherwise than the trainer's
            assert 0 < metrics["policy/correction_fraction"] < 1 and 0 < metrics["policy/correction_ess"] <= 1
            assert metrics["policy/log_prob_gap_max"] > 0
        if "overlong" in key:
            assert -1 <= metrics["reward/overlong_mean"] < 0
            assert metrics["reward/mean"] == plain["reward/mean"]
