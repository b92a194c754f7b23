"""What is printed: progress and sample tables."""

import io
import json
import math
import re

import pytest
from rich.console import Console

from hybridflow.observe.progress import (
    Pace,
    ProgressStyle,
    cells,
    choose_style,
    duration,
    open_progress,
)
from hybridflow.observe.samples import RolloutSample, SampleLog, elided, escaped, shown

METRICS = {"time/step": 1.84, "reward/mean": 0.4123, "policy/kl_reference": 0.0031, "perf/tokens_per_second": 5120.4}


def console(*, terminal=False, width=140):
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, highlight=False,
                   color_system="truecolor" if terminal else None, _environ={"TERM": "xterm"})


@pytest.mark.parametrize("rank, wanted, terminal, style", [
    (0, True, True, ProgressStyle.BAR),
    (0, True, False, ProgressStyle.LINES),
    (0, False, True, ProgressStyle.NONE),
    (3, True, True, ProgressStyle.NONE),
])
def test_style(rank, wanted, terminal, style):
    assert choose_style(rank=rank, wanted=wanted, is_terminal=terminal) is style


def test_lines_are_one_row_a_step():
    out = console(width=40)
    progress = open_progress(ProgressStyle.LINES, 3, out)
    for step in (1, 2, 3):
        progress.step(step, METRICS)
    progress.close()
    assert out.file.getvalue().splitlines() == [
        "step 1/3 | 1.84 s | reward 0.412 | KL 0.0031 | 5,120 tokens/s | 4 s left",
        "step 2/3 | 1.84 s | reward 0.412 | KL 0.0031 | 5,120 tokens/s | 2 s left",
        "step 3/3 | 1.84 s | reward 0.412 | KL 0.0031 | 5,120 tokens/s",
    ]


def test_missing_metrics_are_dashes():
    assert cells({}) == ["- s", "reward -", "- tokens/s"]
    assert cells({"policy/kl_reference": 0.5})[2] == "KL 0.5000"
    assert cells(METRICS | {"eval/accuracy": 0.75})[4] == "held-out accuracy 0.750"
    assert cells({"sft/loss": 1.5, "time/step": 2.0}) == ["2.00 s", "loss 1.5000", "- tokens/s"]
    assert cells({"reward/mean": math.nan})[1] == "reward nan"


def test_bar_on_a_terminal():
    out = console(terminal=True)
    progress = open_progress(ProgressStyle.BAR, 10, out, first_step=5)
    progress.step(5, METRICS)
    out.print("a sentence above")
    progress.close()
    text = out.file.getvalue()
    assert "step 5/10" in text and "1.84 s  reward 0.412  KL 0.0031  5,120 tokens/s" in text
    assert "9 s left" in text
    assert "a sentence above" in text
    assert text.endswith("\x1b[?25h")  # the cursor is shown again


def test_bar_keeps_its_numbers_on_80_columns():
    out = console(terminal=True, width=80)
    progress = open_progress(ProgressStyle.BAR, 200, out)
    progress.step(120, METRICS)
    progress.close()
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.file.getvalue()).replace("\r", "\n").split("\n")
    (row,) = {line.rstrip() for line in last if "120/200" in line}
    assert row.startswith("step 120/200 ")
    assert row.endswith(" 1.84 s  reward 0.412  KL 0.0031  5,120 tokens/s 2 min 27 s left")


def test_none_prints_nothing():
    out = console()
    progress = open_progress(ProgressStyle.NONE, 3, out)
    progress.step(1, METRICS)
    progress.close()
    assert out.file.getvalue() == ""


def test_time_left_ignores_one_slow_step():
    pace = Pace()
    for seconds in (1, 1, 60, 1, 1):
        pace.add({"time/step": seconds})
    assert pace.left(30) == "30 s left"
    assert pace.left(0) == "" and Pace().left(5) == ""


def test_duration():
    assert [duration(s) for s in (0.4, 59.4, 59.6, 372, 3599.7, 11_100)] == [
        "0 s", "59 s", "1 min 00 s", "6 min 12 s", "1 h 00 min", "3 h 05 min"]


def test_escaping_leaves_no_character_that_acts():
    text = "\x1b[31mred\r\n\x07 \u202eevil\u2028 \x9b2J \ud800 tab\t ok é 漢"
    assert escaped(text) == r"\x1b[31mred\r\n\x07 \u202eevil\u2028 \x9b2J \ud800 tab\t ok é 漢"


def test_eliding_keeps_both_ends():
    assert elided("short", 10) == "short"
    text = "H" * 400 + "answer 42"
    cut = elided(text, 100)
    assert cut.startswith("H" * 40 + " [... 309 characters ...] ") and cut.endswith("answer 42")
    assert len(shown(text, 100)) == 100 + len(" [... 309 characters ...] ")


def test_samples_are_shown_safely_and_kept_whole(tmp_path):
    out, path = console(terminal=True), tmp_path / "samples.jsonl"
    log = SampleLog(path, out, resume=False)
    hostile = "[bold red]not markup[/bold red] [/] \x1b]0;title\x07" + "x" * 500
    log.take(7, [RolloutSample("2+2=\n", hostile, "4", 1.0), RolloutSample("?", "", None, math.nan)])
    log.close()
    text = out.file.getvalue()
    assert "Rollouts of step 7" in text
    assert "[bold red]not" in text and "[/]" in text
    assert "\x1b]0" not in text and "\x07" not in text and r"\x1b]0;title" in text
    assert "x" * 300 not in text.replace("\n", "")
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {"step": 7, "prompt": "2+2=\n", "response": hostile, "truth": "4", "reward": 1.0}
    assert second == {"step": 7, "prompt": "?", "response": "", "truth": None, "reward": None}


def test_no_samples_no_table(tmp_path):
    out = console()
    SampleLog(tmp_path / "s.jsonl", out, resume=False).take(1, [])
    assert out.file.getvalue() == ""
