"""What `bench learn` reads from a run, and that it knows every algorithm."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from hybridflow.bench import learn
from hybridflow.bench.learn_options import ALGORITHMS, PREFERENCE
from hybridflow.config.load import load_config
from hybridflow.config.words import AlgorithmName

CONFIGS = Path(__file__).parents[2] / "configs"


def test_it_knows_every_algorithm_by_its_config():
    assert set(ALGORITHMS) - set(PREFERENCE) == {one.value for one in AlgorithmName}
    for name in ALGORITHMS:
        config = load_config(CONFIGS / f"{name}_tiny.yaml")
        assert name in PREFERENCE or config.algorithm.name.value == name
        assert config.model.path == str(learn.WARM_START)


def test_a_run_is_read_from_before_its_first_step_to_after_its_last(tmp_path):
    lines = [{"step": 0, "eval/accuracy": 0.25}, {"step": 1, "time/step": 2.0, "cost/mean": 0.5},
             {"step": 2, "time/step": 3.0, "cost/mean": 0.125, "eval/accuracy": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    one = learn.Learned.read("safe_rlhf", tmp_path / "metrics.jsonl")
    assert (one.start, one.end, one.gain, one.steps, one.seconds, one.cost) == (0.25, 0.75, 0.5, 2, 5.0, (0.5, 0.125))
    assert learn.row(one) == ("safe_rlhf", "right answers", "0.250", "0.750", "+0.500", "2", "5")


@pytest.mark.parametrize(("end", "code"), [(0.45, 0), (0.44, 1)])
def test_too_small_a_gain_is_a_fault(end, code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(learn, "WARM_START", tmp_path)
    one = learn.Learned("rloo", learn.ACCURACY, 0.25, end, 9, 1.0)
    monkeypatch.setattr(learn, "learn", lambda name, ranks, folder: one)
    assert learn.main(Namespace(algorithms=("rloo",), ranks=4, dir=tmp_path)) == code
    assert ("rloo: gains 0.190, not 0.2" in capsys.readouterr().out) == bool(code)


def test_a_run_that_fails_shows_the_end_of_its_log(tmp_path):
    with pytest.raises(learn.RunError, match="(?s)rloo ended with 3; .*rloo.log:\nwhat went wrong"):
        learn._run("rloo", [sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"], tmp_path)
