"""`bench generate`: what a step must do, who is judged how, and that contestants answer through their pipes."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.bench import generate, generate_case, generate_check, generate_floor, generate_options, generate_race
from hybridflow.bench.generate_case import MODELS, Cell, Precision, prompts, write_model
from hybridflow.bench.generate_check import WrongTokensError, check_greedy, check_sampled
from hybridflow.bench.generate_floor import Floor, Machine
from hybridflow.bench.generate_options import VLLM_PYTHON, Options
from hybridflow.bench.generate_process import Answer, ContestantError, ContestantProcess
from hybridflow.bench.generate_race import CONTINUOUS, GENERATE, OURS, VLLM, Result, Times
from hybridflow.cli import parser
from hybridflow.models.config import Head
from hybridflow.models.weights import canonical_shapes

CELL = Cell("tiny", Precision.FP32, 8)


def test_the_models_are_those_that_the_options_name():
    assert tuple(MODELS) == generate_options.MODELS
    assert tuple(precision.value for precision in Precision) == generate_options.DTYPES
    sizes = [sum(torch.Size(shape).numel() for shape in canonical_shapes(config, Head.LANGUAGE_MODEL).values())
             for config in MODELS.values()]
    assert [round(size / 1e6, 1) for size in sizes] == [8.0, 124.7]


def test_what_a_step_needs_at_least():
    body = 8 * (256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 704)
    assert CELL.matrix_numel == body + 4096 * 256
    cached = 32 + 64
    assert CELL.step_flops == 8 * (2 * CELL.matrix_numel + 8 * 8 * 2 * 2 * 32 * cached)
    assert CELL.step_bytes == 4 * (CELL.matrix_numel + 8 * 8 * 4 * 2 * 32 * cached)
    assert replace(CELL, precision=Precision.BF16).step_bytes * 2 == CELL.step_bytes
    floor = Floor(flops=1e9, bytes=1e9)
    assert floor.step_seconds(CELL) == pytest.approx(CELL.step_flops / 1e9)
    assert Floor(1e12, 1e9).step_seconds(CELL) == pytest.approx(CELL.step_bytes / 1e9)
    assert floor.round_seconds(CELL) == pytest.approx((CELL.prefill_flops + 127 * CELL.step_flops) / 1e9)


def test_prompts_of_rounds_differ_and_are_the_same_for_all():
    assert prompts(CELL, 1) == prompts(CELL, 1) != prompts(CELL, 2)
    assert [len(row) for row in prompts(CELL, 1)] == [32] * 8


def test_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generate_floor, "LEAST_S", 0.02)
    machine = Machine("", "fp32", 1)
    machine_flops = machine.flops_per_second()
    assert 1e8 < machine_flops < 1e14 and 1e7 < machine.bytes_per_second(1 << 20) < 1e13
    assert machine.flops_per_second() >= machine_flops


def test_missed_bounds_are_named():
    assert generate.missed(result()) == []
    slow = only(generate.missed(result(generate=2.9)))
    assert "2.90 times the tokens in a CPU second of transformers, not 3.0" in slow
    assert "transformers CB" in only(generate.missed(result(continuous=2.9)))
    assert "0.99" in only(generate.missed(result(vllm=0.99)))
    small = replace(result(generate=1.8), cell=Cell("small", Precision.BF16, 1))
    assert generate.missed(small) == []
    without = replace(result(), times={name: times for name, times in result().times.items() if name != VLLM})
    assert generate.missed(without) == []


def test_a_result_is_told_in_rows():
    first, second, *_ = generate.rows(result(generate=3.5))
    assert first[:5] == ("tiny fp32 b8", "ours", "1024", "1024", "1.00x") and first[-1].endswith("x")
    assert second[1] == "transformers" and second[4] == "3.50x" and second[-2:] == ("", "")
    told = generate.explained([result()], Options(), 60.0)
    assert "Above 1.3 times the floor (an aim, no bound): tiny fp32 b8" in told and VLLM_PYTHON in told
    assert VLLM_PYTHON not in generate.explained([result()], Options(vllm_python="python"), 60.0)


def test_options_are_read():
    def read(*words: str) -> Options:
        return Options.of(parser().parse_args(["bench", "generate", *words]))

    assert replace(read(), vllm_python=None) == Options()
    some = read("--models", "tiny", "--batches", "1,8", "--dtypes", "bf16", "--peers", "", "--json", "x.json")
    assert (some.models, some.batches, some.dtypes, some.peers) == (("tiny",), (1, 8), ("bf16",), ())
    assert some.json == Path("x.json")
    given = argparse.ArgumentParser()
    generate_options.add_arguments(given, {VLLM_PYTHON: "/there/python"})
    assert given.parse_args([]).vllm_python == "/there/python"


@pytest.mark.parametrize("words", [("--models", "huge"), ("--batches", "0"), ("--batches", "1,x"), ("--rounds", "-1")])
def test_options_that_cannot_be_are_refused(words: tuple[str, ...]):
    with pytest.raises(SystemExit) as exit_:
        parser().parse_args(["bench", "generate", *words])
    assert exit_.value.code == 2


def test_every_round_starts_with_another():
    assert [generate_race.turn(["a", "b", "c"], number) for number in range(3)] == [
        ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert generate_race.names(Options()) == [OURS, GENERATE, CONTINUOUS]
    assert generate_race.names(Options(vllm_python="python")) == [OURS, GENERATE, CONTINUOUS, VLLM]


def test_who_has_had_his_time_has_no_more_rounds():
    seconds = {OURS: 1.0, GENERATE: 2.5, VLLM: 30.0}

    class Racer(Fake):
        def call(self, method: str, *args: Any) -> Answer:
            return Answer(8 * args[1], seconds[self.name], 2 * seconds[self.name])

    machine = Fake("machine", flops_per_second=1e11, bytes_per_second=1e10)
    found = generate_race._raced(CELL, {name: Racer(name) for name in seconds}, machine, Options(rounds=3, seconds=4.0))
    assert found.times == {OURS: Times((1.0,) * 3, (2.0,) * 3), GENERATE: Times((2.5,) * 2, (5.0,) * 2),
                           VLLM: Times((30.0,), (60.0,))}


class Fake:
    """A contestant that answers what it was given."""

    def __init__(self, name: str = "fake", **values: Any) -> None:
        self.name, self.values = name, values

    def call(self, method: str, *args: Any) -> Answer:
        return Answer(self.values[method], 0.0, 0.0)


def test_who_computes_something_else_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generate_check, "ROWS", 2)
    monkeypatch.setattr(generate_check, "TOKENS", 2)
    tokens, zeros = [[1, 2], [3, 4]], [[0.0, 0.0], [0.0, 0.0]]
    contestant = Fake(greedy=tokens, sampled=(tokens, [[-1.0, -2.0], [-3.0, -4.0]]))
    check_greedy(contestant, Fake(scored=(zeros, zeros)), CELL, 1e-4)
    assert check_sampled(contestant, Fake(scored=([[-1.0, -2.0], [-3.0, -4.00005]], zeros)), CELL) < 1e-4
    with pytest.raises(WrongTokensError, match="fake, tiny fp32: greedy: a token's log-prob is 1.0e-03 below"):
        check_greedy(contestant, Fake(scored=(zeros, [[0.0, 1e-3], [0.0, 0.0]])), CELL, 1e-4)
    with pytest.raises(WrongTokensError, match="a log-prob differs by nan"):
        check_sampled(contestant, Fake(scored=([[float("nan"), -2.0], [-3.0, -4.0]], zeros)), CELL)
    with pytest.raises(WrongTokensError, match=r"it gave \[1, 2\] new ones, not 2 each"):
        check_greedy(Fake(greedy=[[1], [3, 4]]), contestant, CELL, 1e-4)


def test_contestants_race_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    config = replace(MODELS["tiny"], vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
                     num_kv_heads=2, head_dim=8, initializer_range=0.2)
    monkeypatch.setitem(generate_case.MODELS, "tiny", config)
    write_model(config, tmp_path, Precision.FP32)
    options = Options(batches=(3,), peers=(GENERATE,), new_tokens=8, rounds=2, threads=1)
    results, difference = generate_race.race("tiny", Precision.FP32, options, tmp_path)
    assert difference < 1e-4
    assert [(one.cell.batch, list(one.times), len(one.times[OURS].walls)) for one in results] == [
        (3, [OURS, GENERATE], 2)]
    assert all(one.to_floor > 0 and one.faster(GENERATE) > 0 for one in results)


def test_a_contestant_that_ends_says_why(tmp_path: Path):
    with ContestantProcess("machine", tmp_path, "fp8", 1) as process, pytest.raises(ContestantError, match="fp8"):
        process.ready()


def result(generate: float = 3.0, continuous: float = 5.0, vllm: float = 1.5) -> Result:
    """A cell in which we take a second."""
    times = {OURS: 1.0, GENERATE: generate, CONTINUOUS: continuous, VLLM: vllm}
    return Result(CELL, Floor(1e11, 1e10), {name: Times((s,) * 3, (s,) * 3) for name, s in times.items()})


def only(faults: list[str]) -> str:
    [fault] = faults
    return fault
