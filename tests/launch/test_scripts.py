"""The scripts parse, are strict, carry nothing of one machine, and set up only what has changed."""

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [*sorted((ROOT / "launch").iterdir()), ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    assert "http" not in text
    code = [line.split("#", 1)[0] for line in text.splitlines()]
    unquoted = [line for line in code if re.search(r"(?<![\"'\w=\[{}:(])\$(?!\()[A-Za-z_{@]", line)
                and '"' not in line and "[[" not in line]
    assert unquoted == []


def test_scripts_can_be_run():
    for script in SCRIPTS:
        assert script.stat().st_mode & stat.S_IXUSR, script


def bash(code, **env):
    return subprocess.run(["bash", "-c", code], cwd=ROOT, env=dict(os.environ) | env, capture_output=True, text=True,
                          timeout=60)


@pytest.fixture
def fake_venv(tmp_path):
    """An environment whose Python writes down what it is asked to do."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/usr/bin/env bash\necho "$@" >>"{tmp_path}/calls"\n')
    python.chmod(0o755)
    return tmp_path


def calls(folder):
    file = folder / "calls"
    return file.read_text().splitlines() if file.exists() else []


def set_up(folder, extra=""):
    ended = bash(f'source launch/env.sh; setup_env {extra}; echo "$OMP_NUM_THREADS"',
                 HYBRIDFLOW_VENV=str(folder / "venv"), OMP_NUM_THREADS="")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "1\n"


def test_setting_up_installs_torch_first_and_only_once(fake_venv):
    set_up(fake_venv)
    first = calls(fake_venv)
    assert first[-1].endswith(f"--editable {ROOT}")
    if len(first) == 2:  # no GPU on this machine
        assert first[0].endswith("torch==2.13.0")
    set_up(fake_venv)
    assert calls(fake_venv) == first
    set_up(fake_venv, "dev")
    assert calls(fake_venv)[-1].endswith(f"--editable {ROOT}[dev]")


def test_a_failed_installation_is_not_taken_for_done(fake_venv):
    (fake_venv / "venv" / "bin" / "python").write_text("#!/usr/bin/env bash\nexit 7\n")
    ended = bash("source launch/env.sh; setup_env", HYBRIDFLOW_VENV=str(fake_venv / "venv"))
    assert ended.returncode == 7
    assert not list((fake_venv / "venv").glob("installed-*"))


def test_torchrun_on_several_nodes_needs_to_know_where_it_is(fake_venv):
    env = {"HYBRIDFLOW_VENV": str(fake_venv / "venv"), "NNODES": "2"}
    assert "NODE_RANK" in bash("bash launch/torchrun.sh train x.yaml", **env).stderr
    assert "MASTER_ADDR" in bash("bash launch/torchrun.sh train x.yaml", NODE_RANK="1", **env).stderr


def test_torchrun_gets_one_process_or_a_static_rendezvous(fake_venv):
    torchrun = fake_venv / "venv" / "bin" / "torchrun"
    torchrun.write_text('#!/usr/bin/env bash\necho "$@"\n')
    torchrun.chmod(0o755)
    env = {"HYBRIDFLOW_VENV": str(fake_venv / "venv"), "NPROC": "2"}
    one = bash("bash launch/torchrun.sh train x.yaml 'a=b c'", **env)
    assert one.stdout == "--standalone --nproc-per-node 2 -m hybridflow train x.yaml a=b c\n"
    two = bash("bash launch/torchrun.sh train x.yaml", NNODES="2", NODE_RANK="1", MASTER_ADDR="h0", **env)
    assert two.stdout == ("--rdzv-backend static --nnodes 2 --node-rank 1 --master-addr h0 --master-port 29500 "
                          "--nproc-per-node 2 -m hybridflow train x.yaml\n")
