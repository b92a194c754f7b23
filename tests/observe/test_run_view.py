"""The learning curve, the summary, and the view that ties all of it together."""

import io
import json
import math
import struct

import pytest
from rich.console import Console

from hybridflow.observe.curve import draw_curve, learning_curve, series, smoothed
from hybridflow.observe.run_view import RunView, ViewOptions
from hybridflow.observe.samples import RolloutSample
from hybridflow.observe.summary import summarise


def records(num_steps, *, critic=True):
    rows = []
    for step in range(1, num_steps + 1):
        row = {"step": step, "reward/mean": step / 10, "policy/kl_reference": 0.01 * step, "policy/entropy": 1.0,
               "policy/loss": -0.1, "policy/grad_norm": 2.0, "time/step": 2.0, "time/generate": 1.0,
               "time/update_actor": 0.5, "perf/tokens_per_second": 1000.0}
        rows.append(row | {"critic/loss": 0.5, "critic/grad_norm": 1.0} if critic else row)
    rows[0] |= {"eval/accuracy": 0.25}
    rows[-1] |= {"eval/accuracy": 0.75}
    return rows


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


@pytest.mark.parametrize("num_steps, critic", [(1, True), (12, False), (60, True)])
def test_curve_is_a_png(tmp_path, num_steps, critic):
    source = write(tmp_path / "metrics.jsonl", records(num_steps, critic=critic))
    assert draw_curve(source, tmp_path / "out" / "curve.png", "a run")
    assert png_size(tmp_path / "out" / "curve.png") == (1950, 1040)


def test_curve_of_no_steps_is_no_file(tmp_path):
    source = write(tmp_path / "metrics.jsonl", [])
    assert not draw_curve(source, tmp_path / "curve.png", "a run")
    assert not (tmp_path / "curve.png").exists()


def test_curve_draws_the_numbers_logged():
    rows = records(12)
    rows[5]["policy/grad_norm"] = None
    figure = learning_curve(rows, "a run")
    reward, kl, entropy, loss, loss_twin, norm, norm_twin, seconds = figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in reward.lines}
    assert lines == {"mean reward": [row["reward/mean"] for row in rows], "held-out accuracy": [0.25, 0.75]}
    assert list(norm_twin.lines[0].get_ydata()) == [1.0] * 12 and len(loss_twin.lines) == 1
    assert math.isnan(norm.lines[0].get_ydata()[5])
    assert {text.get_text() for text in seconds.get_legend().get_texts()} == {"generate", "update actor", "other"}


def test_only_what_was_logged_gets_a_panel():
    rows = [{"step": 1, "sft/loss": 2.0, "sft/grad_norm": 1.0, "time/step": 1.0}, {"step": 2, "eval/accuracy": 0.5}]
    titles = [ax.get_title(loc="left") for ax in learning_curve(rows, "a run").axes]
    assert titles == ["Reward, held-out accuracy", "Supervised loss (nats per token)", "Gradient norm",
                      "Step time (s), evaluation left out"]
    assert learning_curve([{"step": 1, "time/step": None}], "a run") is None


def test_one_very_slow_step_is_named_and_does_not_flatten_the_rest():
    rows = records(12)
    rows[3]["time/step"] = 100.0
    seconds = learning_curve(rows, "a run").axes[-1]
    assert "step 4 took 100.0" in seconds.get_title(loc="left")
    assert seconds.get_ylim()[1] < 10


def test_series_and_smoothing():
    assert series([{"step": 1, "a": 2.0}, {"step": 2}, {"step": 3, "a": None}], "a")[0] == [1, 3]
    assert smoothed([1, 2, math.nan, 6, 3], 3) == [1.5, 1.5, 4.0, 4.5, 4.5]


def test_summary():
    words = summarise(records(20))
    assert words == (
        "20 steps took 40 s. Mean reward went from 0.300 to 1.800 (means of the first and last 5 steps). "
        "Held-out accuracy went from 0.250 to 0.750. The KL to the reference ended at 0.2000 nats per token. "
        "Throughput was 1,000 tokens/s over the run. Most time of a step went to generate 50%, update actor 25%."
    )


def test_summary_speaks_of_trouble():
    rows = records(3)
    rows[1] |= {"policy/loss": None, "reward/faults_timeout": 2.0, "train/skipped_steps": 0.0}
    rows[2] |= {"reward/faults_raised": 1.0, "train/skipped_steps": 1.0, "policy/log_prob_gap_max": 3e-6}
    words = summarise(rows)
    assert words.endswith("Look into this: optimizer steps skipped (gradient norm not finite, or nothing to "
                              "train on): 1; rollouts that "
                          "the reward function failed on: 3; logged values that were not finite: 1.")
    assert "and generation and training log-probs differed by 3.0e-06 at most." in words


def test_summary_counts_failed_tools_and_costs():
    rows = [row | {"rollout/tool_calls": 4.0, "rollout/tool_faults": 1.0, "cost/faults_raised": 2.0}
            for row in records(3)]
    assert summarise(rows).endswith("Look into this: rollouts that the cost function failed on: 6; calls of tools that "
                                    "failed: 3 of 12.")


def test_phases_that_overlap_are_no_shares_of_a_whole():
    rows = [row | {"time/generate": 2.5, "time/update_actor": 1.0} for row in records(3)]
    assert ("Ranks worked side by side; of a step's time they were busy with generate 100%, update actor 50%."
            in summarise(rows))


def test_summary_of_little():
    assert summarise([]) == "No step was finished."
    assert summarise([{"step": 1, "reward/mean": 0.5}]) == "The run made 1 step. Mean reward was 0.500."


def run(options, rank, first, last):
    console = Console(file=io.StringIO(), width=120, highlight=False)
    view = RunView(options, rank, console)
    view.say("[b]Begins.")
    for step in range(first, last + 1):
        view.step(step, {"reward/mean": step / 10, "time/step": 1.0})
        view.samples(step, [RolloutSample("2+2=", "4", "4", 1.0)] * 3)
    view.finish()
    return console.file.getvalue()


def test_view_from_start_to_finish_and_on(tmp_path):
    options = ViewOptions(tmp_path / "run", "a run", total_steps=2, num_samples=2, strict=True)
    out = run(options, 0, 1, 2)
    assert out.startswith("[b]Begins.\nstep 1/2 | 1.00 s | reward 0.100 | - tokens/s |")
    assert "2 steps took 2 s. Mean reward went from 0.100 to 0.200." in out
    assert png_size(tmp_path / "run" / "learning_curve.png") == (1300, 520)
    assert len((tmp_path / "run" / "samples.jsonl").read_text().splitlines()) == 4

    resumed = ViewOptions(tmp_path / "run", "a run", total_steps=4, first_step=3, num_samples=0, strict=True)
    assert "4 steps took 4 s." in run(resumed, 0, 3, 4)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


def test_what_was_measured_before_training_is_step_0(tmp_path):
    console = Console(file=io.StringIO(), width=120, highlight=False)
    view = RunView(ViewOptions(tmp_path, "a run", total_steps=1, strict=True), 0, console)
    view.before_training({"eval/accuracy": 0.25})
    view.step(1, {"time/step": 2.0, "eval/accuracy": 0.5})
    view.finish()
    out = console.file.getvalue()
    assert out.startswith("Before training, held-out accuracy is 0.250.\nstep 1/1 |")
    assert "1 step took 2 s. Held-out accuracy went from 0.250 to 0.500." in out
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0, 1]


def test_other_ranks_touch_nothing(tmp_path):
    assert run(ViewOptions(tmp_path / "run", "a run", total_steps=2), 1, 1, 2) == ""
    assert not (tmp_path / "run").exists()
