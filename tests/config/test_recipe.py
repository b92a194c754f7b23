"""What a config's algorithm is when nothing is left open: the recipe's values, unless the config says otherwise."""

from dataclasses import replace

import pytest

from hybridflow.algorithms.recipes import RECIPES
from hybridflow.algorithms.registry import Need
from hybridflow.config.command import Command
from hybridflow.config.files import missing_files
from hybridflow.config.layouts import Role, roles
from hybridflow.config.load import load_config, to_yaml
from hybridflow.config.recipe import algorithm_line, choices_of_advantage, loss_entry, needs_of, with_recipe
from hybridflow.config.validate import validate
from hybridflow.config.words import AlgorithmName, KLEstimatorName, KLWhere, LossReduction
from tests.config.builders import SPEC, config

TWO = "generation.samples_per_prompt=2"


def resolved(*overrides):
    return with_recipe(config(TWO, *overrides)).algorithm


def told(*overrides, command=Command.TRAIN):
    return {fault.key: str(fault) for fault in validate(config(*overrides), 1, command)}


@pytest.mark.parametrize("name", AlgorithmName)
def test_a_resolved_config_is_valid_says_everything_and_starts_the_same_run(name, tmp_path):
    costs = ["cost.function=a.py:f"] if name is AlgorithmName.SAFE_RLHF else []
    whole = with_recipe(config(TWO, f"algorithm.name={name.value}", *costs))
    assert validate(whole, 1) == [] and with_recipe(whole) == whole
    assert whole.algorithm.loss_reduction and whole.algorithm.kl.where and whole.algorithm.advantage
    assert whole.algorithm.policy_loss and whole.algorithm.normalise_advantages is not None
    (tmp_path / "config.yaml").write_text(to_yaml(whole))
    again = load_config(tmp_path / "config.yaml")
    assert with_recipe(again) == whole and roles(again) == roles(config(TWO, f"algorithm.name={name.value}"))
    assert RECIPES[name.value].paper in algorithm_line(again)


def test_ppo_and_grpo_are_what_they_always_were():
    ppo, grpo = resolved(), resolved("algorithm.name=grpo")
    for one in (ppo, grpo):
        assert (one.clip.low, one.clip.high, one.clip.dual) == (0.2, 0.2, None)
        assert one.loss_reduction is LossReduction.TOKEN_MEAN and one.kl.where is KLWhere.NONE
        assert one.policy_loss == "ppo" and one.overlong_buffer is None
    assert (ppo.advantage, ppo.normalise_advantages) == ("gae", True)
    assert (grpo.advantage, grpo.normalise_advantages, grpo.grpo_std_normalise) == ("grpo", False, True)
    assert resolved("algorithm.kl.where=loss").kl.estimator is KLEstimatorName.K1


@pytest.mark.parametrize(("name", "expected"), [
    ("dr_grpo", ("dr_grpo", "ppo", "constant-length", "none", None, False, 0.2, 0.2)),
    ("rloo", ("rloo", "reinforce", "seq-mean-token-sum", "reward", "k1", False, None, None)),
    ("reinforce_pp", ("reinforce_pp", "ppo", "token-mean", "reward", "k1", True, 0.2, 0.2)),
    ("reinforce_pp_baseline", ("reinforce_pp_baseline", "ppo", "token-mean", "loss", "k2", True, 0.2, 0.2)),
    ("gspo", ("grpo", "gspo", "seq-mean-token-mean", "none", None, False, 3e-4, 4e-4)),
    ("cispo", ("grpo", "cispo", "token-mean", "none", None, False, 1.0, 4.0)),
])
def test_the_papers_values(name, expected):
    a = resolved(f"algorithm.name={name}")
    estimator = a.kl.estimator and a.kl.estimator.value
    assert (a.advantage, a.policy_loss, a.loss_reduction.value, a.kl.where.value, estimator, a.normalise_advantages,
            a.clip.low, a.clip.high) == expected


def test_what_the_config_says_wins():
    a = resolved("algorithm.name=gspo", "algorithm.loss_reduction=token-mean", "algorithm.clip.high=0.5",
                 "algorithm.kl={where: reward, estimator: k2}", "algorithm.normalise_advantages=true",
                 "algorithm.advantage=rloo", "algorithm.overlong_buffer=7")
    assert (a.advantage, a.policy_loss, a.clip.low, a.clip.high, a.normalise_advantages, a.overlong_buffer) == (
        "rloo", "gspo", 3e-4, 0.5, True, 7)
    assert (a.loss_reduction, a.kl.where, a.kl.estimator) == (LossReduction.TOKEN_MEAN, KLWhere.REWARD,
                                                              KLEstimatorName.K2)
    # A loss that is not the recipe's own brings its own bounds.
    assert resolved("algorithm.policy_loss=gspo").clip.high == 4e-4
    assert resolved("algorithm.policy_loss=reinforce").clip.low is None


def test_roles_come_from_the_estimator():
    def has_critic(*overrides):
        return Role.CRITIC in roles(config(TWO, *overrides))

    assert has_critic() and has_critic("algorithm.name=grpo", "algorithm.advantage=gae")
    assert not has_critic("algorithm.name=rloo") and not has_critic("algorithm.advantage=grpo")
    # A user's estimator is given what the named algorithm's own is given.
    assert has_critic("algorithm.advantage=mine.py:f")
    assert not has_critic("algorithm.name=grpo", "algorithm.advantage=mine.py:f")
    assert Role.REFERENCE in roles(config("algorithm.name=reinforce_pp"))
    assert Role.REFERENCE not in roles(config("algorithm.name=reinforce_pp", "algorithm.kl.where=none"))
    assert Need.GROUP in needs_of(config("algorithm.name=cispo").algorithm)


def test_groups_are_asked_for_by_those_who_compare():
    for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "gspo", "cispo"):
        assert told(f"algorithm.name={name}")["generation.samples_per_prompt"].endswith(
            f"{name} compares the samples of a prompt with each other; choose 2 or more")
    assert told() == told("algorithm.name=reinforce_pp") == {}


def test_names_are_looked_up():
    found = told("algorithm.advantage=grop", "algorithm.policy_loss=mine.txt:f", TWO)
    assert found["algorithm.advantage"] == (
        "algorithm.advantage = grop: is neither a name of the table nor file.py:function; did you mean grpo? It may be "
        "gae, grpo, dr_grpo, rloo, reinforce_pp or reinforce_pp_baseline")
    assert "choose ppo, reinforce, gspo, gspo_token or cispo" in found["algorithm.policy_loss"]
    for name in ("remax", "safe_rlhf"):  # nobody gives them a greedy answer, or a cost
        assert "algorithm.advantage" in told(f"algorithm.advantage={name}")
        assert name not in choices_of_advantage(config().algorithm)
    assert told("algorithm.advantage=a.py:f", "algorithm.policy_loss=a.py:g") == {}
    missing = missing_files(config("algorithm.advantage=a.py:f", f"algorithm.policy_loss={__file__}:g"), Command.TRAIN)
    assert "there is no file a.py" in [str(fault) for fault in missing if fault.key == "algorithm.advantage"][0]
    assert "algorithm.policy_loss" not in {fault.key for fault in missing}


def test_a_users_functions_may_read_every_number():
    assert told("algorithm.advantage=a.py:f", "algorithm.gamma=0.5", "algorithm.lam=0.5",
                "algorithm.grpo_std_normalise=false") == {}
    assert told("algorithm.policy_loss=a.py:f", "algorithm.clip={low: 0.5, high: 0.5, dual: 2}") == {}
    assert loss_entry(config("algorithm.policy_loss=a.py:f").algorithm).has_dual_clip


def test_the_overlong_buffer_fits_in_the_length_limit():
    assert told("algorithm.overlong_buffer=64") == {} == told("algorithm.overlong_buffer=0")
    assert told("algorithm.overlong_buffer=65")["algorithm.overlong_buffer"].endswith("choose 64 or less")


def test_a_step_says_what_its_algorithm_is():
    line = algorithm_line(config(TWO, "algorithm.name=grpo", "algorithm.kl={where: loss, estimator: k3}",
                                 "algorithm.correction.level=token", "algorithm.overlong_buffer=9"))
    assert line == ("grpo (arXiv 2402.03300): advantage grpo; policy loss ppo, clip 0.2 and 0.2; reduction token-mean; "
                    "KL k3 in the loss, coef 0.01; rewards fall over the last 9 tokens; importance correction by token "
                    "(truncate)")


def test_dapos_buffer_is_a_fifth_of_the_limit(monkeypatch):
    """Its name cannot be chosen before its dataflow is there; the arithmetic is."""
    ours = dict(RECIPES) | {"grpo": RECIPES["dapo"]}
    monkeypatch.setattr("hybridflow.config.recipe.RECIPES", ours)
    whole = resolved("algorithm.name=grpo", "generation.max_new_tokens=50")
    assert (whole.overlong_buffer, whole.clip.low, whole.clip.high) == (10, 0.2, 0.28)
    assert with_recipe(replace(load_config(SPEC), algorithm=whole)).algorithm == whole
