"""The map to verl's names: every row stands on metrics of ours, and its formula is verl's written out."""

import re

import pytest

from hybridflow.observe.metric_log import MetricLog
from hybridflow.observe.metric_names import find_metric
from hybridflow.observe.verl_names import RANKS, SAME, STEP, VERL_METRICS, describe, verl_metrics

# A step of 4 rollouts on 2 ranks: prompts of 3 tokens, responses of 2, 4, 6, 8.
OURS = {"rollout/samples": 4.0, "rollout/prompt_tokens_mean": 3.0, "rollout/response_tokens_mean": 5.0,
        "rollout/response_tokens_max": 8.0, "rollout/response_tokens_min": 2.0, "time/step": 2.0, "time/generate": 0.5,
        "time/reference": 0.16, "time/evaluate": 7.0, "reward/mean": 0.5, "reward/max": 1.0, "reward/min": 0.0,
        "policy/surrogate_loss": -0.1, "data/epoch": 2.0, "critic/lr": 1e-5}


def test_rows_stand_on_metrics_of_ours():
    assert len({(row.name, row.unless, len(row.needs)) for row in VERL_METRICS}) == len(VERL_METRICS)
    for row in VERL_METRICS:
        for name in {*row.needs, *filter(None, [row.unless])} - {STEP, RANKS}:
            assert find_metric(name) is not None, (row.name, name)
        assert row.differs


def test_formulas_written_out():
    found = verl_metrics(3, OURS, 2)
    tokens = 4 * (3 + 5)
    assert found == pytest.approx({
        "perf/total_num_tokens": tokens, "perf/time_per_step": 2.0, "perf/throughput": tokens / (2.0 * 2),
        "timing_s/step": 2.0, "timing_s/gen": 0.5, "timing_s/ref": 0.16, "timing_s/testing": 7.0,
        "timing_per_token_ms/gen": 0.5 * 1000 / 20, "timing_per_token_ms/ref": 0.16 * 1000 / tokens,
        "critic/score/mean": 0.5, "critic/score/max": 1.0, "critic/score/min": 0.0,
        "critic/rewards/mean": 0.5, "critic/rewards/max": 1.0, "critic/rewards/min": 0.0,
        "response_length/mean": 5.0, "response_length/max": 8.0, "response_length/min": 2.0, "prompt_length/mean": 3.0,
        "actor/pg_loss": -0.1, "training/global_step": 3.0, "training/epoch": 2.0})


def test_a_kl_in_the_reward_is_taken_off_the_rewards():
    found = verl_metrics(1, OURS | {"policy/kl_coef": 0.1, "policy/kl_reference": 0.02}, 1)
    assert found["critic/rewards/mean"] == pytest.approx(0.5 - 0.1 * 0.02 * 5)
    assert not {"critic/rewards/max", "critic/rewards/min"} & found.keys() and found["critic/score/max"] == 1.0
    assert found["actor/reward_kl_penalty"] == 0.02 and found["actor/reward_kl_penalty_coeff"] == 0.1
    assert "actor/reward_kl_penalty" not in verl_metrics(1, OURS | {"policy/kl_reference": 0.02}, 1)


def test_names_that_are_ours_too_are_logged_once():
    assert not OURS.keys() & verl_metrics(1, OURS, 1).keys()


def test_held_out_metrics():
    ours = {"eval/accuracy": 1.0, "eval/a/b/mean@4": 0.1, "eval/a/b/std@4": 0.2, "eval/a/b/best@4": 0.9,
            "eval/a/b/best_redrawn@2": 0.3, "eval/a/b/best_redrawn@4": 0.4, "eval/a/b/maj_redrawn@4": 0.5,
            "eval/a/b/best_redrawn@1": 0.1, "eval/mean@4": 0.7}
    assert verl_metrics(0, ours, 1) == {
        "training/global_step": 0.0, "val-core/a/b/reward/mean@4": 0.1, "val-aux/a/b/reward/std@4": 0.2,
        "val-aux/a/b/reward/best@2/mean": 0.3, "val-core/a/b/reward/best@4/mean": 0.4,
        "val-core/a/b/reward/maj@4/mean": 0.5}
    assert verl_metrics(0, {"eval/s/mean@1": 0.25}, 1)["val-core/s/reward/mean@1"] == 0.25


def test_the_table_is_markdown_and_says_what_differs():
    rows = describe().splitlines()
    assert {row.count("|") for row in rows} == {4}
    assert any(row.startswith("| `actor/ppo_kl` | `policy/approx_kl` | verl's is the k1 estimate") for row in rows)
    assert sum(row.endswith(f"| {SAME} |") for row in rows) > 20
    assert all(re.match(r"\| (`|verl|---)", row) for row in rows)


def test_the_log_adds_them_for_every_sink():
    class Sink:
        def log(self, step, metrics):
            self.logged = (step, metrics)

        def close(self):
            pass

    sink = Sink()
    log = MetricLog([sink], print, strict=True, renamed=lambda step, metrics: verl_metrics(step, metrics, 2))
    log.log(3, {"reward/mean": 0.5})
    assert sink.logged == (3, {"reward/mean": 0.5, "critic/score/mean": 0.5, "critic/rewards/mean": 0.5,
                               "training/global_step": 3.0})
