"""vLLM as the generator of whole commands, where it is installed: its log-probs are the trainer's, step after step."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from hybridflow.bench.generate_options import VLLM_PYTHON
from tests.trainer.runs import make_tokenizer

ROOT = Path(__file__).parent.parent.parent
PYTHON = os.environ.get(VLLM_PYTHON)
pytestmark = pytest.mark.skipif(not PYTHON, reason=f"{VLLM_PYTHON} does not name an interpreter that has vLLM")


def run(*words: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run((PYTHON, "-m", *words), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_sees_the_log_probs_that_vllm_drew(ranks: int, tmp_path: Path):
    """With the weights of each step: those of the second are others, and the gap is as small."""
    make_tokenizer(tmp_path)
    launcher = () if ranks == 1 else ("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m")
    run(*launcher, "tests.trainer.vllm_steps", str(tmp_path))
    told = [json.loads((tmp_path / f"told.{rank}.json").read_text()) for rank in range(ranks)]
    for one in told:
        assert all(step["finite"] and step["gap"] < 1e-4 and step["samples"] == 18 for step in one)
        assert one[0]["weights"] != one[1]["weights"]
    for step in range(2):
        assert sorted(row for one in told for row in one[step]["rows"]) == list(range(18))
        assert all(one[step]["tokens"] >= len(one[step]["rows"]) > 0 for one in told)
