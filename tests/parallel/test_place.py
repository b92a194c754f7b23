"""What launchers say: torchrun, srun, neither, and half of one."""

import subprocess
import sys

import pytest

from hybridflow.parallel.place import Place, launched_place

MEETING = {"MASTER_ADDR": "h", "MASTER_PORT": "1"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}  # of the job, no step


@pytest.mark.parametrize(("env", "place"), [
    ({}, Place(0, 1, 0)),
    (MEETING | {"RANK": "3", "WORLD_SIZE": "4"}, Place(3, 4, 3)),
    (MEETING | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, Place(3, 4, 1)),
    (MEETING | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
     Place(3, 4, 1, ranks_per_node=2)),
    (MEETING | STEP | {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4"}, Place(5, 8, 1, "h", 1, 4)),
    (MEETING | STEP | {"SLURM_LOCALID": "2", "SLURM_STEP_TASKS_PER_NODE": "2,3(x2)"}, Place(5, 8, 2, "h", 1, 3)),
    (MEETING | STEP, Place(5, 8, 0, "h", 1)),
    (MEETING | STEP | {"SLURM_LOCALID": "1"}, Place(5, 8, 1, "h", 1)),
    (MEETING | STEP | {"RANK": "1", "WORLD_SIZE": "2"}, Place(1, 2, 1)),  # torchrun inside of srun
    (MEETING | STEP | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Place(0, 1, 0)),
    (BATCH_SCRIPT, Place(0, 1, 0)),
    (MEETING | BATCH_SCRIPT, Place(0, 1, 0)),
    ({"WORLD_SIZE": "1"}, Place(0, 1, 0)),
])
def test_the_place(env, place):
    assert launched_place(env) == place


@pytest.mark.parametrize(("env", "missing"), [
    ({"RANK": "0"}, "without WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    ({"WORLD_SIZE": "2"}, "without RANK, MASTER_ADDR, MASTER_PORT"),
    (MEETING | {"RANK": "0", "WORLD_SIZE": "abc"}, "WORLD_SIZE='abc', which is no number"),
    (STEP, "srun started 8 tasks but MASTER_ADDR, MASTER_PORT is not set"),
])
def test_half_a_launch_is_refused(env, missing):
    with pytest.raises(ValueError, match=missing):
        launched_place(env)


def test_it_needs_no_torch():
    code = "import sys, hybridflow.parallel.place; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
