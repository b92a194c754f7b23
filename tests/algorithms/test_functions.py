"""Estimators and policy losses by name: all of the tables, and a user's from a file, with every error told."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridflow.algorithms.advantages import AdvantageOptions, Estimate, Rewarded
from hybridflow.algorithms.estimation import estimated
from hybridflow.algorithms.functions import find_estimator, find_policy_loss
from hybridflow.algorithms.losses import Clip, finish_metrics
from hybridflow.algorithms.objectives import ActorObjective
from hybridflow.algorithms.recipes import RECIPES
from hybridflow.algorithms.registry import ADVANTAGES, POLICY_LOSSES, Need
from hybridflow.algorithms.users_own import UsersEstimator, UsersLoss
from hybridflow.micro_batch import TokenColumns
from hybridflow.target_rows import TargetRows
from tests.algorithms.wrong_functions import WRONG_ESTIMATORS, WRONG_LOSSES

OWN = Path(__file__).with_name("users_own.py")
REWARDED = Rewarded(torch.tensor([1.0, 3.0]).double(), torch.zeros(2, dtype=torch.int64), (0, 1), (1, 2),
                    torch.ones(3).double(), torch.tensor([1.0, 0.0, 3.0]).double())


def test_the_tables_name_functions_that_exist_and_recipes_name_the_tables():
    for spec in ADVANTAGES:
        assert find_estimator(spec).__name__ == f"{spec}_advantages"
    for spec in POLICY_LOSSES:
        assert find_policy_loss(spec).__name__.endswith("_policy_loss")
    for recipe in RECIPES.values():
        assert recipe.advantage in ADVANTAGES and recipe.policy_loss in POLICY_LOSSES
    options = set(vars(AdvantageOptions()))
    assert all(entry.options <= options for entry in ADVANTAGES.values())
    assert {need for entry in ADVANTAGES.values() for need in entry.needs} == set(Need)


def test_nobody_writes_the_tables():
    for table in (ADVANTAGES, POLICY_LOSSES, RECIPES):
        with pytest.raises(TypeError):
            table["mine"] = None


def test_a_users_functions_are_taken_from_their_file():
    advantages = estimated(find_estimator(f"{OWN}:scaled_scores"), REWARDED, AdvantageOptions(), whitened=False)
    assert advantages.estimate.advantages.tolist() == pytest.approx([2 - 14 / 3, 6 - 14 / 3, 6 - 14 / 3])
    columns = TokenColumns(torch.full((2,), 0.5), advantages=torch.tensor([1.0, 2.0]))
    log_probs = torch.tensor([-1.0, -9.0], requires_grad=True)
    objective = ActorObjective(Clip(0.2), policy_loss=find_policy_loss(f"{OWN}:bounded_log_prob"))
    loss, sums = objective(log_probs, None, columns, TargetRows.of([2]))
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (1.0 + 2 * 3.2)) and log_probs.grad.tolist() == [-0.5, 0.0]
    metrics = finish_metrics(sums)
    assert metrics == pytest.approx({"policy_loss": loss.item(), "loss": loss.item()})


def test_the_example_of_the_readme(tmp_path):
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(# mine.py;.*?)```", text, re.DOTALL)
    (tmp_path / "mine.py").write_text(example)
    best = find_estimator(f"{tmp_path}/mine.py:best_of_group")
    assert estimated(best, REWARDED, AdvantageOptions(), whitened=False).estimate.advantages.tolist() == [0, 1, 1]
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    columns = TokenColumns(torch.full((2,), 0.5), advantages=torch.tensor([1.0, 2.0]))
    loss, sums = find_policy_loss(f"{tmp_path}/mine.py:squared")(log_probs, columns, TargetRows.of([2]), Clip())
    loss.backward()
    assert log_probs.grad.tolist() == [-0.5, -1.0] and sums["policy_loss"].item() == loss.item() == -1.5


@pytest.mark.parametrize(("spec", "told"), [
    ("grop", "neither file.py:function nor one of gae, grpo"),
    ("own.txt:scaled_scores", "neither file.py:function"),
    ("nowhere/own.py:scaled_scores", "there is no file /"),
    (f"{OWN}:scaled_score", "scaled_score is not there in .*; did you mean scaled_scores?"),
    (f"{OWN}:NOT_A_FUNCTION", "NOT_A_FUNCTION is no function in"),
    (f"{OWN}:takes_one", r"takes_one\(rewarded\) cannot be called with \(rewarded, options\)"),
])
def test_what_is_wrong_with_a_name_is_told(spec, told):
    with pytest.raises(ValueError, match=told) as caught:
        find_estimator(spec)
    assert str(caught.value).startswith(f"algorithm.advantage = {spec}: ")


def test_a_file_that_does_not_import_is_told(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import torch\nraise RuntimeError('not today')\n")
    with pytest.raises(ValueError, match="broken.py does not import: RuntimeError: not today"):
        find_policy_loss(f"{broken}:loss")
    broken.write_text("raise SystemExit(0)\n")
    with pytest.raises(ValueError, match="broken.py does not import: SystemExit: 0"):
        find_estimator(f"{broken}:estimate")


@pytest.mark.parametrize(("name", "told"), [
    ("a_tensor", r"returned a tensor of float64 of shape \(3,\); it must return an Estimate"),
    ("nothing", "returned None; it must return an Estimate"),
    ("one_too_few", r"advantages that are a tensor of float64 of shape \(2,\); .* of shape \(3,\)"),
    ("not_finite", r"advantages that are not finite \(3 of 3\)"),
    ("integers", "advantages that are a tensor of int64"),
    ("no_returns", "returned no returns, and there is a critic"),
    ("returns_of_rows", r"returns that are a tensor of float64 of shape \(2,\)"),
    ("returns_not_finite", "returns that are not finite"),
])
def test_what_a_users_estimator_returns_is_looked_at(name, told):
    with_critic = replace(REWARDED, values=torch.zeros(3).double())
    with pytest.raises(ValueError, match=f"^algorithm.advantage = mine.py:f: .*{told}"):
        UsersEstimator("algorithm.advantage = mine.py:f", WRONG_ESTIMATORS[name])(with_critic, AdvantageOptions())


def test_advantages_that_are_not_finite_have_a_reason():
    huge = replace(REWARDED, token_rewards=REWARDED.token_rewards.float(), row_rewards=REWARDED.row_rewards * 1e300)
    with pytest.raises(ValueError, match="the largest reward is 3e\\+300; scale the rewards"):
        estimated(find_estimator("dr_grpo"), huge, AdvantageOptions(), whitened=False)
    diverged = replace(REWARDED, values=torch.full((3,), torch.nan).double())
    with pytest.raises(ValueError, match="since the critic's values are not"):
        estimated(find_estimator("gae"), diverged, AdvantageOptions(), whitened=False)
    assert isinstance(find_estimator("dr_grpo")(REWARDED, AdvantageOptions()), Estimate)


def learned(loss, log_probs):
    """The gradient of two tokens' log-probs under `loss`, as a run takes it."""
    columns = TokenColumns(torch.full((2,), 0.5), advantages=torch.tensor([1.0, 2.0]))
    told = torch.tensor(log_probs, requires_grad=True)
    objective = ActorObjective(Clip(), policy_loss=UsersLoss("algorithm.policy_loss = mine.py:f", loss))
    objective(told, None, columns, TargetRows.of([2]))[0].backward()
    return told.grad


@pytest.mark.parametrize(("name", "told"), [
    ("no_pair", r"returned a tensor of float32 of shape \(\); it must return a pair"),
    ("nothing", "returned None; it must return a pair"),
    ("of_tokens", r"a loss that is a tensor of float32 of shape \(2,\); it must be a scalar"),
    ("a_number", "a loss that is a float; it must be a scalar"),
    ("no_sums", "beside the loss, a list; it must be a dict of scalar tensors"),
    ("sums_of_tokens", r"beside the loss, a dict of 'x': a tensor of float32 of shape \(2,\)"),
    ("detached", "a loss without a gradient"),
    ("not_finite", "the loss nan for 2 tokens, .* are all finite"),
    ("gradient", "the gradient of its loss is NaN for 2 of 2 tokens"),
])
def test_what_a_users_loss_returns_is_looked_at(name, told):
    with pytest.raises(ValueError, match=f"^algorithm.policy_loss = mine.py:f: .*{told}"):
        learned(WRONG_LOSSES[name], [-1.0, -2.0])


def test_what_is_wrong_with_a_return_is_told_before_a_run(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("import torch\nfrom hybridflow.algorithms.advantages import Estimate\n"
                   "def nan(rewarded, options):\n    return Estimate(rewarded.token_rewards * torch.nan)\n"
                   "def detached(log_probs, columns, rows, clip):\n    return log_probs.detach().sum(), {}\n"
                   "def fickle(log_probs, columns, rows, clip):\n"
                   "    return log_probs.sum(), {'a': torch.ones(())} if len(log_probs) else {}\n"
                   "def picky(log_probs, columns, rows, clip):\n    raise ValueError(columns.versions.shape)\n")
    with pytest.raises(ValueError, match=f"algorithm.advantage = {own}:nan: returned advantages that are not finite"):
        find_estimator(f"{own}:nan")
    with pytest.raises(ValueError, match=f"algorithm.policy_loss = {own}:detached: returned a loss without a gradient"):
        find_policy_loss(f"{own}:detached")
    with pytest.raises(ValueError, match=f"{own}:fickle: returned the sums a of some tokens and none of no tokens"):
        find_policy_loss(f"{own}:fickle")
    assert find_policy_loss(f"{own}:picky").name.endswith(":picky")  # a run may have what it wants


def test_a_critic_that_has_diverged_is_not_the_estimators_fault():
    passed_on = UsersEstimator("mine", lambda rewarded, options: Estimate(rewarded.values, rewarded.values))
    with pytest.raises(ValueError, match="since the critic's values are not"):
        estimated(passed_on, replace(REWARDED, values=REWARDED.mask * torch.nan), AdvantageOptions(), whitened=False)


def test_a_model_that_has_diverged_is_not_the_losss_fault():
    """Such a step is skipped and counted, as with a loss of ours."""
    assert learned(WRONG_LOSSES["not_finite"], [torch.nan, -2.0]).isnan().any()
    assert learned(WRONG_LOSSES["gradient"], [torch.inf, -2.0]).isnan().any()
