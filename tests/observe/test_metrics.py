"""The metric table, the log and its sinks."""

import builtins
import json
import math
import re
import sys

import pytest

from hybridflow.config.words import WandbMode
from hybridflow.observe.jsonl import JsonlFile, read_jsonl
from hybridflow.observe.metric_log import JsonlSink, MetricLog, read_metrics
from hybridflow.observe.metric_names import METRICS, check_names, describe, find_metric
from hybridflow.observe.tensorboard_sink import open_tensorboard
from hybridflow.observe.wandb_sink import WandbSink

NAN, INF = math.nan, math.inf


class Recorder:
    """A sink that keeps what it is given."""

    def __init__(self):
        self.logged = []
        self.closed = False

    def log(self, step, metrics):
        self.logged.append((step, metrics))

    def close(self):
        self.closed = True


def test_table_is_sound():
    names = [info.name for info in METRICS]
    assert len(set(names)) == len(names)
    for info in METRICS:
        assert re.fullmatch(r"[a-z_]+/[a-z_0-9*@]+", info.name)
        assert info.unit and info.over and info.meaning.endswith(".")


@pytest.mark.parametrize("name", [
    "reward/mean", "reward/std", "rollout/response_tokens_mean", "rollout/finished_fraction", "policy/loss",
    "policy/clip_fraction", "policy/approx_kl", "policy/entropy", "policy/kl_reference", "policy/ratio_mean",
    "policy/log_prob_gap_max", "policy/log_prob_gap_mean", "policy/grad_norm", "policy/lr", "critic/loss",
    "critic/value_mean", "critic/explained_variance", "critic/grad_norm", "advantage/mean", "advantage/std",
    "eval/accuracy", "time/step", "perf/tokens_per_second", "perf/samples_per_second", "reshard/received_bytes",
    "reshard/seconds", "train/skipped_steps", "reward/faults_timeout",
])
def test_table_covers(name):
    assert find_metric(name) is not None


def test_unknown_names_are_all_told_with_the_nearest():
    with pytest.raises(ValueError, match=r"'policy/los'.*'policy/loss'.*'zzz'"):
        check_names(["policy/los", "reward/mean", "zzz"])


def test_describe_is_a_markdown_table():
    rows = describe().splitlines()
    assert len(rows) == len(METRICS) + 2
    assert {row.count("|") for row in rows} == {5}
    assert "| `reward/mean` | reward |" in describe()


def test_log_fans_out_and_closes():
    first, second = Recorder(), Recorder()
    log = MetricLog([first, second], print, strict=True)
    log.log(3, {"reward/mean": 0.5})
    log.close()
    assert first.logged == second.logged == [(3, {"reward/mean": 0.5})]
    assert first.closed and second.closed


def test_strict_refuses_unknown_names():
    sink = Recorder()
    with pytest.raises(ValueError, match="reward/meen"):
        MetricLog([sink], print, strict=True).log(1, {"reward/meen": 0.5})
    assert sink.logged == []


def test_otherwise_unknown_names_are_logged_and_told_once():
    sink, said = Recorder(), []
    log = MetricLog([sink], said.append)
    log.log(1, {"mine/own": 1.0})
    log.log(2, {"mine/own": 2.0})
    assert len(sink.logged) == 2
    assert len(said) == 1 and "mine/own" in said[0]


def test_a_rank_without_sinks_does_nothing():
    said = []
    log = MetricLog([], said.append, strict=True)
    log.log(1, {"no/such": NAN})
    log.close()
    assert said == []


def test_jsonl_line_is_there_at_once_and_has_null_for_nan(tmp_path):
    path, said = tmp_path / "run" / "metrics.jsonl", []
    sink = JsonlSink(path, said.append, resume=False)
    sink.log(1, {"reward/mean": 0.5, "policy/loss": NAN})
    sink.log(2, {"reward/mean": -INF, "policy/loss": NAN})
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first.pop("unix_time") > 1e9
    assert first == {"step": 1, "reward/mean": 0.5, "policy/loss": None}
    assert second["reward/mean"] is None
    assert said == ["policy/loss is nan at step 1: metrics.jsonl has null there.",
                    "reward/mean is -inf at step 2: metrics.jsonl has null there."]
    sink.close()
    assert said[2:] == ["3 values of metrics were not finite: policy/loss 2, reward/mean 1."]


def test_resume_appends_and_the_later_line_of_a_step_stands(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for resume, steps, value in ((False, (1, 2, 3), 1.0), (True, (3, 4), 2.0)):
        sink = JsonlSink(path, print, resume=resume)
        for step in steps:
            sink.log(step, {"reward/mean": value})
        sink.close()
    assert len(path.read_text().splitlines()) == 5
    assert [(r["step"], r["reward/mean"]) for r in read_metrics(path)] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_resume_drops_a_torn_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_jsonl(path) == [{"step": 1}]
    file = JsonlFile(path, resume=True)
    file.write({"step": 2})
    file.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_new_run_keeps_the_file_before(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n')
    JsonlFile(path, resume=False).close()
    assert path.read_text() == ""
    assert (tmp_path / "m.previous.jsonl").read_text() == '{"step": 1}\n'


def test_wandb_offline_needs_no_account(tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    sink = WandbSink(WandbMode.OFFLINE, tmp_path / "run", "test run", {"train": {"lr": 1e-3}})
    sink.log(1, {"reward/mean": 0.5, "policy/loss": NAN})
    sink.log(2, {"reward/mean": 0.75})
    sink.close()
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (data,) = folder.glob("run-*.wandb")
    content = data.read_bytes()
    assert b"reward/mean" in content and b"test run" in content
    assert capfd.readouterr().out == ""


def test_wandb_chosen_but_absent_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"logging\.wandb=offline.*pip install wandb.*logging\.wandb=off"):
        WandbSink(WandbMode.OFFLINE, tmp_path, "x", {})


def test_tensorboard_writes_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = open_tensorboard(tmp_path, print)
    sink.log(1, {"reward/mean": 0.25})
    sink.log(2, {"reward/mean": 0.5})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_tensorboard_absent_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said = []
    assert open_tensorboard(tmp_path / "tb", said.append) is None
    assert len(said) == 1 and "TensorBoard is not installed" in said[0]
    assert not (tmp_path / "tb").exists()


def test_optional_libraries_are_imported_only_when_chosen(monkeypatch):
    modules = ["hybridflow.observe.wandb_sink", "hybridflow.observe.tensorboard_sink", "hybridflow.observe.run_view"]
    real_import, asked = builtins.__import__, []

    def spy(name, *args, **kwargs):
        asked.append(name)
        return real_import(name, *args, **kwargs)

    for module in modules:
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(builtins, "__import__", spy)
    for module in modules:
        __import__(module)
    assert "hybridflow.observe.wandb_sink" in asked
    assert not [name for name in asked if name.split(".")[0] == "wandb" or "tensorboard" in name.split(".")]
