"""The tables of bounds and of keys without effect (case 27): each of their keys is refused, and exists."""

import pytest

from hybridflow.config.bounds import BOUNDS
from hybridflow.config.idle import IDLE
from hybridflow.config.load import known_keys
from tests.config.test_validate import faults

# --- bounds: each key of the table is refused outside and accepted at an edge -------------------------------------

OUTSIDE = {"must lie in [1, 1e9]": (0, 4_000_000_000), "must lie in [1, 1024]": 2000, "must lie in [1, 1e6]": 1e-9,
           "must lie in [1, 10000000]": (0, 4_000_000_000), "must lie in [0, 10000000]": 4_000_000_000,
           "must lie in [0.001, 1e6]": 1e7, "must be at least 2": 1,
           "must not be negative": -1, "must be a finite number that is not negative": -0.5,
           "must be a finite number above 0": 0, "must be a finite number of at least 1": 0.5, "must be above 1": 1,
           "must lie in [1, 2^32]": 0.5, "must lie in [0.001, 1000]": 0, "must be a finite number": ".inf",
           "must lie in [1, 256]": 257, "must lie in [0, 1]": 1.5,
           "must lie in [0, 0.5)": 0.5, "must lie in (0, 1]": 0,
           "must be two numbers in [0, 1)": "[0.9]",
           "must be 0 (greedy) or lie in [1e-6, 1e6]": 1e-9, "must lie in [1e-6, 1e6]": 0,
           "weights are split by tensor and pipeline parallelism here, not by ZeRO": 3,
           "is no accuracy that can be reached": 1.5, "is too small for a vocabulary": 5}


@pytest.mark.parametrize(("key", "outside"), [(key, OUTSIDE[bound.rule]) for bound in BOUNDS for key in bound.keys])
def test_bounds(key, outside):
    for value in outside if isinstance(outside, tuple) else (outside,):
        assert key in faults(1, f"{key}={value}")


def test_infinite_and_nan_rates_are_refused():
    assert {"train.optimizer.lr", "algorithm.kl.coef"} <= set(
        faults(1, "train.optimizer.lr=.inf", "algorithm.kl.coef=.nan", "algorithm.kl.where=reward"))


def test_a_list_of_the_base_can_be_emptied():
    mixture = ("data.source=mixture", "data.mixture=[{task: chain_sum}]")
    assert "data.tasks" in faults(1, *mixture, "data.tasks=[{name: spell_backward}]")
    assert "data.tasks" not in faults(1, *mixture, "data.tasks=[]")


# --- case 27: a key without effect is refused ----------------------------------------------------------------------

SET = {
    "model.critic": "model.critic.path=a", "train.critic_optimizer": "train.critic_optimizer.lr=1",
    "algorithm.gamma": "algorithm.gamma=0.5", "algorithm.lam": "algorithm.lam=0.5",
    "algorithm.value_clip": "algorithm.value_clip=null", "algorithm.value_loss_coef": "algorithm.value_loss_coef=3",
    "algorithm.clip.low": "algorithm.clip.low=0.5", "algorithm.clip.high": "algorithm.clip.high=0.2",
    "algorithm.clip.dual": "algorithm.clip.dual=3", "algorithm.correction.how": "algorithm.correction.how=mask",
    "algorithm.correction.low": "algorithm.correction.low=0",
    "algorithm.correction.high": "algorithm.correction.high=3",
    "algorithm.grpo_std_normalise": "algorithm.grpo_std_normalise=false",
    "algorithm.kl.estimator": "algorithm.kl.estimator=k3", "algorithm.kl.coef": "algorithm.kl.coef=0.5",
    "algorithm.kl.target": "algorithm.kl.target=3", "model.reference": "model.reference.layout.tp=1",
    "algorithm.constant_length": "algorithm.constant_length=5",
    "tools.call": "tools.call=json", "tools.max_turns": "tools.max_turns=3",
    "tools.max_observation_tokens": "tools.max_observation_tokens=9", "tools.timeout_s": "tools.timeout_s=2",
    "tools.on_error": "tools.on_error=end", "tools.role": "tools.role=user",
    "tools.wrapper": "tools.wrapper='({observation})'",
    "generation.max_staleness": "generation.max_staleness=3", "placement.critic": "placement.critic=0",
    "placement.reference": "placement.reference=0",
    "placement.reward": "placement.reward=0",
    "algorithm.safe": "algorithm.safe.multiplier=2", "cost": "cost.timeout_s=3",
    "model.cost_model": "model.cost_model.path=m", "model.cost_critic": "model.cost_critic.path=m",
    "placement.cost": "placement.cost=0", "placement.cost_critic": "placement.cost_critic=0",
    "model.cost_model.layout": "model.cost_model.layout.tp=1",
    "algorithm.safe.pretrain_batch_size": "algorithm.safe.pretrain_batch_size=3",
    "model.reward_model.layout": "model.reward_model.layout.tp=1",
    "reward.mixture": "reward.mixture=[{name: a, function: a.py:f}]", "reward.on_fault": "reward.on_fault.raised=zero",
    **{key: f"{key}={value}" for key, value in {
        "model.reward_model.pair": "true", "model.reward_model.label": 1, "model.reward_model.dtype": "bf16",
        "model.reward_model.micro_batch_size": 4, "reward.function": "a.py:f", "reward.batched": "true",
        "reward.timeout_s": 3, "reward.memory_mb": 100, "reward.workers": 2, "reward.on_fault.raised": -1,
        "reward.on_fault.timed_out": "zero", "reward.on_fault.wrong_type": "error", "reward.on_fault.crashed": 0.5,
        "reward.on_fault.out_of_memory": -1}.items()},
    "reward.reasoning_gym": "reward.reasoning_gym=partial", "data.train_files": "data.train_files=[a]",
    "data.test_files": "data.test_files=[a]", "data.tasks": "data.tasks=[{name: gcd}]",
    "data.test_tasks": "data.test_tasks=[{name: gcd}]", "data.size": "data.size=9999",
    "data.test_size": "data.test_size=999", "data.prompt_template": "data.prompt_template='{question}'",
    "train.optimizer.min_lr": "train.optimizer.min_lr=1", "train.critic_optimizer.min_lr":
    "train.critic_optimizer.min_lr=1",
    "train.micro_batch_size": "train.micro_batch_size=8",
    "train.gradient_accumulation_steps": "train.gradient_accumulation_steps=8",
    "train.forward_micro_batch_size": "train.forward_micro_batch_size=4",
    "train.recompute_layers": "train.recompute_layers=1", "train.loss_scale": "train.loss_scale=2.0",
    "train.loss_scale_window": "train.loss_scale_window=5",
    "data.mixture": "data.mixture=[{task: gcd}]",
    "data.streaming": "data.streaming=true",
    "data.shuffle_buffer": "data.shuffle_buffer=5",
    "evaluation.samples_per_prompt": "evaluation={every_steps: null, samples_per_prompt: 4, temperature: 1.0}",
    "evaluation": "evaluation.prompts=5",
    "evaluation.temperature": "evaluation.temperature=0.5", "evaluation.save_answers": "evaluation.save_answers=true",
    "evaluation.top_k": "evaluation.top_k=5", "evaluation.top_p": "evaluation.top_p=0.5",
    "evaluation.min_p": "evaluation.min_p=0.5",
}
GRPO = ["algorithm.name=grpo", "generation.samples_per_prompt=2"]
SAFE = ["algorithm.name=safe_rlhf", "cost.function=a.py:f"]
CONDITIONS = [
    GRPO, GRPO, GRPO, [], ["algorithm.policy_loss=reinforce"], ["algorithm.policy_loss=cispo"], [],
    ["algorithm.correction.level=token"], [], ["tools.file=a.py", "tools.wrapper='{observation}'"],
    [], [], [], ["algorithm.kl.where=loss"], [],
    [], ["algorithm.name=safe_rlhf", "model.cost_model.path=m"], SAFE, SAFE, [],
    ["model.reward_model.path=m"], ["model.reward_model.path=m"], ["reward.function=a.py:f"],
    ["reward.mixture=[{name: a, reasoning_gym: exact}]"], [],
    ["reward.mixture=[{name: a, reasoning_gym: exact, on_fault: {raised: zero}}]"], [],
    ["data.source=jsonl", "data.train_files=[a]", "reward.function=a.py:f"],
    ["data.source=mixture", "data.mixture=[{task: chain_sum}]"],
    ["data.source=mixture", "data.mixture=[{task: chain_sum}]"],
    ["data.source=mixture", "data.mixture=[{files: [a]}]", "reward.function=a.py:f"], [], [], [],
    ["evaluation.every_steps=null"], ["data.source=jsonl", "data.train_files=[a]", "reward.function=a.py:f"], [],
    [], [], ["train.micro_batch_tokens=512"], ["train.micro_batch_tokens=512"],
    ["train.forward_micro_batch_tokens=512"], [], [],
]


def within(key, block):
    return key == block or key.startswith(f"{block}.")


@pytest.mark.parametrize(("overrides", "key"),
                         [(on, key) for on, idle in zip(CONDITIONS, IDLE, strict=True) for key in idle.keys])
def test_idle_keys_are_refused(overrides, key):
    assert not [fault for fault in faults(1, *overrides) if within(fault, key)]
    assert ["has no effect" in message for fault, message in faults(1, *overrides, SET[key]).items()
            if within(fault, key)] == [True]


def test_the_tables_name_keys_that_exist():
    known = set(known_keys())
    for key in [key for table in (BOUNDS, IDLE) for entry in table for key in entry.keys]:
        assert key in known
