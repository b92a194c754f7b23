"""One mistake is one fault: what only follows from it is not told."""

import pytest

from hybridflow.config.check import checked_config
from hybridflow.config.command import Command
from hybridflow.config.faults import ConfigError
from tests.config.builders import SPEC

TREE = SPEC | {"model": SPEC["model"] | {"tokenizer": __file__}}


def told(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        checked_config(TREE, overrides, 1, Command.TRAIN)
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize(("overrides", "told_once"), [
    (("algorithm.kl.where=rewrd", "algorithm.kl={coef: 0.1, estimator: k3}", "model.reference.layout.tp=1"),
     "algorithm.kl.where = rewrd: is not none, reward, loss or null; did you mean reward?"),
    (("algorithm.kl.where=foo", "algorithm.kl.target=3.0"),
     "algorithm.kl.where = foo: is not none, reward, loss or null; choose one of these"),
    (("generation.overlap=partal", "generation.max_staleness=3"),
     "generation.overlap = partal: is not none, one_step_off or partial; did you mean partial?"),
    (("placement.cost=0",),
     "placement.cost = 0: has no effect without a bound on costs; remove it, or choose algorithm.name safe_rlhf"),
    (("algorithm.name=reinforce_pp", "model.critic.path=nowhere"),
     "model.critic.path = nowhere: has no effect without a critic, which this algorithm has not; remove it, or choose "
     "algorithm.name ppo"),
    (("data.source=mixture", "data.mixture=[{files: x.jsonl}]"),
     "data.mixture[0].files = x.jsonl: is not a list, each a text; write [x.jsonl]"),
])
def test_a_mistake_is_one_fault(overrides, told_once):
    assert told(*overrides) == [told_once]


def test_what_is_wrong_whichever_word_was_meant_is_told_too():
    keys = [line.partition(" = ")[0] for line in told("algorithm.kl.where=foo", "algorithm.gamma=2", "tools.role=x")]
    assert keys == ["algorithm.kl.where", "algorithm.gamma", "tools.role"]
