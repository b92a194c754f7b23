"""`hybridflow schedule`: the numbers it prints, what it refuses, and that it needs no ranks and no files."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridflow import cli
from hybridflow.observe.trace import TraceCategory, TraceEvent
from hybridflow.observe.trace_file import write_trace
from hybridflow.parallel.schedules.builders import ScheduleKind
from hybridflow.parallel.schedules.simulate import Costs, simulate
from hybridflow.parallel.schedules.training import build

ROOT = Path(__file__).parents[2]
BASE = """
model: {spec: {num_layers: 8, num_heads: 4}, tokenizer: missing.model}
train: {global_batch_size: 64, micro_batch_size: 4, layout: {tp: 2, pp: 4, dp: 2}}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(BASE)
    return str(path)


def said(capsys, *arguments):
    assert cli.main(["schedule", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def row(text, kind):
    """The cells of a schedule's line in the comparison, the mark of the config's own first."""
    line = next(line for line in text.splitlines() if f" {kind} " in line and "%" in line)
    return line[0].strip(), line[1:].split()


def test_numbers_bubble_and_held_activations(config, capsys):
    text = said(capsys, config)
    assert "tp 2 x pp 4 x dp 2, 16 ranks" in text
    assert "64 rows per update, 32 per replica (dp 2), 8 micro-batches of 4" in text
    assert "simulated: 1f1b with 4 stages of 1 chunk, 8 micro-batches" in text
    assert row(text, "1f1b") == ("*", ["1f1b", "1", "27.3", "%", "33", "4", "3", "2", "1"])
    assert row(text, "gpipe") == ("", ["gpipe", "1", "27.3", "%", "33", "8", "8", "8", "8"])
    assert row(text, "interleaved")[1][:5] == ["interleaved", "2", "15.8", "%", "28.5"]  # 3 / (2 x 8 + 3)
    assert "Bubble: simulated 27.3 % of the time" in text


def test_costs_world_and_micro_batches_can_be_given(config, capsys):
    text = said(capsys, config, "train.layout.dp=null", "--world", "8", "--micro-batches", "4", "--costs", "10,6,4,0.5")
    assert "pp 4 x dp 1, 8 ranks" in text and "4 micro-batches\n" in text
    assert "time (ms)" in text and row(text, "1f1b")[1][4] == "145"  # by hand: 140, and 10 messages are waited for
    assert "tp 2 x pp 4 x dp 1, 8 ranks" in said(capsys, config, "train.layout.dp=null")


def test_options_may_stand_before_keys(config, capsys):
    between = said(capsys, config, "train.layout.pp=2", "--micro-batches", "3", "train.layout.dp=1")
    assert "tp 2 x pp 2 x dp 1, 4 ranks" in between and "3 micro-batches\n" in between
    with pytest.raises(SystemExit):
        cli.main(["schedule", config, "--micro-batches", "3", "--lr", "1"])
    assert "unrecognized arguments: --lr 1" in capsys.readouterr().err


def test_schedules_that_do_not_fit_are_named(config, capsys):
    text = said(capsys, config, "model.spec.num_layers=4")
    assert row(text, "gpipe")[1][0] == "gpipe" and "\n   interleaved" not in text
    for kind in ("interleaved", "zb-v"):
        assert f"{kind} is left out: 4 layers cannot fill its 8 chunks (4 stages of 2)" in text
    alone = said(capsys, config, "train.layout.pp=1")
    assert " gpipe " not in alone and "the other schedules are left out: one stage has no bubble" in alone
    assert "left out" not in said(capsys, config)


def test_the_bytes_of_a_message_take_time(config, capsys):
    """4 rows of at most 256 + 64 tokens x hidden size x 4 bytes, at 0.001 GB/s."""
    sized = [config, "model.spec.hidden_size=64", "train.mixed_precision=no", "--micro-batches", "4"]
    text = said(capsys, *sized, "--costs", "10,6,4,0.5,0.001")
    assert "a message of the longest rows has 3.277e+05 bytes and takes 328 ms on its link" in text
    per_message = 0.5 + 4 * 320 * 64 * 4 / 1e6 * 1e3
    assert said(capsys, *sized, "--costs", f"10,6,4,{per_message}").split("\n\n")[1] == text.split("\n\n")[1]
    halved = said(capsys, *sized, "train.layout.sequence_parallel=true", "--costs", "10,6,4,0.5,0.001")
    assert "has 1.638e+05 bytes" in halved
    assert "has 8.192e+04 bytes" in said(capsys, *sized, "train.layout.sequence_parallel=true", "train.layout.cp=2",
                                         "--costs", "10,6,4,0,1")
    alone = said(capsys, config, "model.spec=null", "model.path=missing", "train.layout.pp=1", "--costs", "1,1,1,0,25")
    assert "a message" not in alone  # one stage sends none, so nobody asks for the shape


def test_a_budget_of_tokens_bounds_the_micro_batches(config, capsys):
    text = said(capsys, config, "train.micro_batch_tokens=1000", "train.micro_batch_size=null")
    # 32 rows of at most 256 + 64 tokens: 3 at least fit
    assert "at most 11 micro-batches" in text


def test_the_text_is_the_schedule(config, capsys):
    text = said(capsys, config, "train.layout.pp=2", "--micro-batches", "1", "--text")
    assert "stage 0: RECV_B0.0 F0.0 SEND_F0.0 B0.0 STEP\nstage 1: RECV_F0.1 F0.1 B0.1 SEND_B0.1 STEP\n" in text


TENS = Costs(0.01, 0.01, 0.01, step=0.01)


def traced(folder, kind=ScheduleKind.ONE_F_ONE_B, costs=TENS, tp=2, dp=2):
    """The trace of a run on 4 stages, 3 micro-batches."""
    made = build(kind, kind.chunks(4, 1), 3)
    timeline = simulate(made, costs)
    phase = TraceEvent("update_actor", TraceCategory.PHASES, 0, 10**9)
    events, labels = {}, {}
    for rank in range(4 * tp * dp):
        stage = rank // (tp * dp)
        events[rank] = [phase, *(TraceEvent(str(s.action), TraceCategory.PIPELINE, round(s.start * 1e9) + place,
                                            round(s.duration * 1e9))
                                 for place, s in enumerate(timeline.stages[stage]))]
        labels[rank] = f"tp {rank % tp}, cp 0, dp {rank // tp % dp}, pp {stage}"
    write_trace(events, folder / "trace.json", labels)
    return str(folder / "trace.json")


def test_it_draws_and_sets_measured_beside_simulated(config, tmp_path, capsys):
    picture = tmp_path / "out.svg"
    text = said(capsys, config, "--trace", traced(tmp_path), "--draw", str(picture))
    assert "3 micro-batches\n" in text and "measured: update 1 of 1 in the trace\n" in text
    assert "Bubble: simulated 50.0 %, measured 50.0 % of the time" in text and f"Drawn in {picture}" in text
    assert picture.read_text().startswith("<?xml") and "measured: bubble 50.0 %" in picture.read_text()


def test_a_trace_tells_the_ranks(config, tmp_path, capsys):
    picture, trace = tmp_path / "out.svg", traced(tmp_path, dp=4)
    text = said(capsys, config, "train.layout.dp=null", "--trace", trace, "--draw", str(picture))
    assert "tp 2 x pp 4 x dp 4, 32 ranks" in text and "16 per replica (dp 4)" in text
    assert "(tp 2 x pp 4 x dp 4)" in picture.read_text()


@pytest.mark.parametrize(("run", "keys", "word"), [
    ({"tp": 1}, [], "with tp 1, and train.layout has tp 2: give the config of that run"),
    ({"dp": 4}, [], "with dp 4, and train.layout has dp 2"),
    ({"dp": 4}, ["train.layout.dp=null", "--world", "24"], "with dp 4, and train.layout has dp 3"),
    ({}, ["train.layout.cp=2"], "with cp 1, and train.layout has cp 2"),
    ({}, ["train.layout.pp=2"], "with pp 4, and train.layout has pp 2"),
    ({"kind": ScheduleKind.GPIPE}, [], "another schedule than train.schedule = 1f1b: give the config of that run"),
])
def test_the_trace_of_another_run_is_refused(config, tmp_path, run, keys, word, capsys):
    assert cli.main(["schedule", config, *keys, "--trace", traced(tmp_path, **run)]) == 2
    got = capsys.readouterr()
    assert word in got.err and got.out == ""


def test_the_own_row_and_the_bubble_below_are_of_the_same_costs(config, tmp_path, capsys):
    uneven = Costs((0.01, 0.03, 0.01, 0.02), 0.01, 0.01, step=0.01)
    text = said(capsys, config, "--trace", traced(tmp_path, costs=uneven))
    assert f"Bubble: simulated {row(text, '1f1b')[1][2]} %" in text
    assert row(text, "1f1b")[1][2] != row(text, "gpipe")[1][2]
    assert "the other rows take all stages to cost their mean, and half of a backward" in text
    given = said(capsys, config, "--trace", traced(tmp_path, costs=uneven), "--costs", "10,10,10")
    assert "take all stages" not in given and f"Bubble: simulated {row(given, '1f1b')[1][2]} %" in given


def test_the_help_says_which_update_is_drawn(capsys):
    with pytest.raises(SystemExit):
        cli.main(["schedule", "--help"])
    said_in_one_line = " ".join(capsys.readouterr().out.split())
    assert "draws the actor's update with the most micro-batches (the last of them)" in said_in_one_line


@pytest.mark.parametrize(("arguments", "word"), [
    (["train.layout.tp=3", "--world", "8"], "train.layout.tp = 3: world size 8 cannot be cut in tp 3"),
    (["train.schedule=zigzag"], "train.schedule = zigzag"),
    (["--trace", "no/trace.json"], "no/trace.json: cannot be read"),
    (["--draw", "out.pdf"], "a schedule is drawn as .svg or .png"),
    (["model.spec=null", "model.path=missing", "--costs", "1,1,1,0,25"], "missing is not here; leave the GB/s away"),
])
def test_faults_end_with_2(config, arguments, word, capsys):
    assert cli.main(["schedule", config, *arguments]) == 2
    got = capsys.readouterr()
    assert word in got.err and got.out == "" and not Path("out.pdf").exists()


@pytest.mark.parametrize("arguments", [["--costs", "1,2"], ["--costs", "a,b,c"], ["--costs", "0,0,0"],
                                       ["--costs", "1,1,1,0,0"], ["--costs", "1,1,1,0,-2"], ["--costs", "1,1,1,0,1,1"],
                                       ["--world", "0"], ["--micro-batches", "-1"]])
def test_a_wrong_option_ends_with_2(config, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["schedule", config, *arguments])
    assert ended.value.code == 2 and arguments[1] in capsys.readouterr().err


def test_micro_batches_are_not_taken_beside_a_trace(config, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["schedule", config, "--micro-batches", "4", "--trace", "trace.json"])
    assert ended.value.code == 2
    assert "argument --trace: not allowed with argument --micro-batches" in capsys.readouterr().err


def test_it_makes_no_process_group_and_needs_no_launch(config, capsys):
    said(capsys, config)
    assert not torch.distributed.is_initialized()


def test_a_fault_is_told_without_torch(config):
    code = ("import sys; from hybridflow.cli import main; code = main(sys.argv[1:]); "
            "print(code, 'torch' in sys.modules)")
    ended = subprocess.run([sys.executable, "-c", code, "schedule", config, "train.layout.pp=0"], cwd=ROOT,
                           capture_output=True, text=True, timeout=120)
    assert ended.stdout.endswith("2 False\n"), ended.stderr


def test_activations_are_told_in_bytes(config, capsys):
    """A stage of 1F1B holds pp - stage micro-batches; selective recomputation makes them smaller."""
    def peaks(text):
        [line] = [line for line in text.splitlines() if line.startswith("Activations of the actor")]
        return [float(word) for word in line.split("at most ")[1].split(" MiB")[0].split(", ")]

    plain = peaks(said(capsys, config))
    assert plain[0] == pytest.approx(2 * plain[2], rel=0.05) and sorted(plain, reverse=True)[:3] == plain[:3]
    assert peaks(said(capsys, config, "train.recompute=selective"))[0] < 0.8 * plain[0]
    assert "not known" in said(capsys, config, "model.spec=null", "model.path=missing")


def test_the_shipped_configs_have_a_schedule(capsys):
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        assert "Bubble: simulated" in said(capsys, str(path)), path
