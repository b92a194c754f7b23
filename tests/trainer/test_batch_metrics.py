"""A batch's own metrics against numpy over all of its rows, on one rank and on ranks of which some have none."""

import numpy
import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.crew import Crew
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.observe.metric_names import check_names
from hybridflow.parallel.world import World
from hybridflow.trainer.batch_metrics import batch_metrics
from tests.ranks import run_ranks

PROMPTS, RESPONSES, FAILED = (3, 5, 2, 5, 4), (4, 1, 6, 2, 6), 2  # row 2's reward failed
NAMES = ("advantages", "returns", "old_values", "old_log_probs", "rollout_log_probs")


def columns(rows, names):
    """Columns of these rows, each number that of its row and place, whoever holds it."""
    made = {}
    for at, name in enumerate(names):
        values = [numpy.random.default_rng([row, at]).normal(size=RESPONSES[row]) for row in rows]
        made[name] = torch.tensor(numpy.concatenate([*values, numpy.zeros(0)]))
    mask = [torch.full((RESPONSES[row],), float(row != FAILED)) for row in rows]
    return TokenColumns(loss_mask=torch.cat([*mask, torch.zeros(0)]), **made)


def metrics_on(world, home, names=NAMES):
    mine = home[world.rank]
    samples = tuple(Sample((1,) * PROMPTS[row], (2,) * RESPONSES[row]) for row in mine)
    batch = Batch(PROMPTS, RESPONSES, tuple(range(5)), home, samples, columns(mine, names))
    return batch_metrics(batch, Crew.whole(world), prompt_limit=5, response_limit=6)


def alone(names=NAMES):
    return metrics_on(World.single(torch.device("cpu")), ((0, 1, 2, 3, 4),), names)


def test_moments_are_numpys_over_trained_tokens():
    metrics, table = alone(), columns([0, 1, 3, 4], NAMES)
    check_names(metrics)
    x = {name: getattr(table, name).numpy() for name in NAMES}
    for name, values in (("advantage/trained", x["advantages"]), ("critic/target", x["returns"]),
                         ("critic/old_value", x["old_values"])):
        for moment in ("mean", "min", "max"):
            assert metrics[f"{name}_{moment}"] == pytest.approx(getattr(numpy, moment)(values), abs=1e-12)
    delta = x["old_log_probs"] - x["rollout_log_probs"]
    assert metrics["policy/rollout_kl"] == pytest.approx(-delta.mean(), abs=1e-12)
    assert metrics["policy/rollout_kl_k3"] == pytest.approx((numpy.exp(delta) - delta - 1).mean(), abs=1e-12)
    gap = numpy.abs(numpy.exp(x["old_log_probs"]) - numpy.exp(x["rollout_log_probs"]))
    for moment, value in (("mean", gap.mean()), ("max", gap.max()), ("std", gap.std(ddof=1))):
        assert metrics[f"policy/prob_gap_{moment}"] == pytest.approx(value, abs=1e-12)


def test_lengths_are_of_all_rows():
    metrics = alone()
    assert {name: value for name, value in metrics.items() if name.startswith("rollout/")} == {
        "rollout/response_tokens_min": 1.0, "rollout/response_limit_fraction": 0.4, "rollout/prompt_tokens_min": 2.0,
        "rollout/prompt_tokens_max": 5.0, "rollout/prompt_limit_fraction": 0.4}


def test_what_was_not_computed_is_left_out():
    metrics = alone(("advantages", "rollout_log_probs"))
    assert {name.partition("/")[0] for name in metrics} == {"rollout", "advantage"}
    assert not any(name.startswith("advantage") for name in alone(()))


def test_ranks_say_the_same_whoever_holds_the_rows():
    """Rank 2 has rows without a trained token, rank 3 has none."""
    for told in run_ranks(4, metrics_on, ((4, 0), (1, 3), (2,), ())):
        assert told == pytest.approx(alone(), abs=1e-12)
