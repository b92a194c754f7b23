"""The command line: exit codes, one voice per job, and nothing heavy before the config is known to be good."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow import __version__, cli
from hybridflow.config.command import Command
from hybridflow.config.faults import ConfigError, Fault

ROOT = Path(__file__).parents[2]
BAD = ROOT / "tests" / "launch" / "bad.yaml"


def run(*arguments, **env):
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=clean | env, capture_output=True, text=True,
                          timeout=120)


def test_a_config_with_faults_ends_with_2_and_names_them_all():
    ended = run("-m", "hybridflow", "train", str(BAD), "train.layout.tp=3", WORLD_SIZE="8", RANK="0", MASTER_ADDR="h",
                MASTER_PORT="1")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "tensor_parallel_szie = 2: unknown key; did you mean train.layout.tp?" in ended.stderr
    assert "world size 8 cannot be cut in tp 3 x pp 1; choose tp 1, 2, 4 or 8" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_config_with_faults_imports_no_torch():
    code = ("import sys; from hybridflow.cli import main; code = main(sys.argv[1:]); "
            "heavy = [name for name in ('torch', 'transformers', 'numpy', 'wandb') if name in sys.modules]; "
            "print(code, heavy)")
    assert run("-c", code, "train", str(BAD)).stdout.strip() == "2 []"


@pytest.mark.parametrize("arguments", [[], ["trian", "x.yaml"], ["train"], ["train", "x.yaml", "--lr", "1"]])
def test_a_wrong_command_line_ends_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: hybridflow" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_shows_a_line_to_copy(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "torchrun --standalone --nproc-per-node 4 -m hybridflow train configs/ppo_tiny.yaml" in text


def test_every_command_has_a_meaning_and_a_module():
    assert set(cli.HELP) == set(Command) - {Command.API, Command.COMPLETE}
    assert {file.stem for file in (ROOT / "hybridflow" / "commands").glob("*.py")} >= {c.value for c in cli.HELP}


def test_version_keys_and_metrics(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"hybridflow {__version__}\n"
    assert cli.main(["keys"]) == 0
    assert "train.layout.tp = 1" in capsys.readouterr().out
    assert cli.main(["metrics"]) == 0
    assert "| `policy/grad_norm` | norm |" in capsys.readouterr().out


def test_a_missing_file_is_a_fault(capsys):
    assert cli.main(["train", "no/such.yaml"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_broken_launch_ends_with_2():
    ended = run("-m", "hybridflow", "train", str(BAD), RANK="0", WORLD_SIZE="8")
    assert ended.returncode == 2 and ended.stderr == \
        "launched with RANK/WORLD_SIZE but without MASTER_ADDR, MASTER_PORT: start it with torchrun\n"


def test_an_interrupt_is_one_line_and_130(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "checked_config", interrupted)
    assert cli.main(["train", "x.yaml"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.parametrize("arguments", [["keys"], ["metrics"], ["verify", "--list"]])
def test_a_reader_who_goes_early_ends_it_quietly(arguments):
    command = [sys.executable, "-m", "hybridflow", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        started.stdout.close()
        assert (started.stderr.read(), started.wait(timeout=120)) == ("", 141)


def test_the_end_of_another_pipe_is_told(monkeypatch):
    def broken(*_):
        raise BrokenPipeError("a worker has gone")

    monkeypatch.setattr(cli, "checked_config", broken)
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write, "w") as output, monkeypatch.context() as patched:
        patched.setattr(cli.sys, "stdout", output)
        with pytest.raises(BrokenPipeError, match="a worker"):
            cli.main(["train", "x.yaml"])


def test_rank_0_speaks_first_and_the_others_wait(monkeypatch, capsys):
    waits = []
    monkeypatch.setattr(cli.time, "sleep", waits.append)
    error = ConfigError("run.yaml", [Fault("train.seed", "x", "is not an integer")])
    cli.report(error, rank=0)
    assert waits == [] and capsys.readouterr().err.startswith("run.yaml: 1 fault\n  train.seed = x")
    cli.report(error, rank=2)
    assert waits == [cli.OTHERS_WAIT_S] and capsys.readouterr().err.startswith("rank 2: run.yaml")
