"""What only a GPU can show: a whole PPO step on CUDA is the CPU's, alone and over NCCL."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridflow.observe.metric_log import read_metrics
from hybridflow.parallel.world import World
from tests.trainer.runs import make_tokenizer, run_steps, tiny_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NAMES = ("reward/mean", "policy/loss", "policy/grad_norm", "critic/loss", "critic/grad_norm", "policy/entropy")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_a_step_on_one_gpu_is_the_cpus(tokenizer: Path, tmp_path: Path):
    """fp64, so that equal tokens are sampled and nothing but the order of sums differs."""
    config = tiny_config(tokenizer, tmp_path)
    on_cpu, answers = run_steps(World.single(torch.device("cpu")), config, 2)
    on_gpu, same = run_steps(World.single(torch.device("cuda", 0)), config, 2)
    assert answers == same
    for step in range(2):
        for name in NAMES:
            assert on_gpu[step][name] == pytest.approx(on_cpu[step][name], rel=1e-7), name


def test_bf16_trains_on_a_gpu(tokenizer: Path, tmp_path: Path):
    config = tiny_config(tokenizer, tmp_path, ("train.mixed_precision=bf16",))
    metrics, _ = run_steps(World.single(torch.device("cuda", 0)), config, 2)
    assert metrics[1]["policy/grad_norm"] > 0 and metrics[1]["train/skipped_steps"] == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("layout", ["train.layout.tp=2", "train.layout.pp=2", "generation.layout.tp=2"])
def test_two_gpus_over_nccl_take_the_step_of_one(layout: str, tokenizer: Path, tmp_path: Path):
    config = tiny_config(tokenizer, tmp_path / "alone")
    alone, _ = run_steps(World.single(torch.device("cuda", 0)), config, 1)
    from hybridflow.config.load import to_yaml

    (tmp_path / "config.yaml").write_text(to_yaml(config))
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
                    "hybridflow", "train", str(tmp_path / "config.yaml"), layout, "train.total_steps=1",
                    f"logging.dir={tmp_path / 'two'}", "evaluation.every_steps=null"], check=True, timeout=300)
    [record] = [r for r in read_metrics(tmp_path / "two" / "metrics.jsonl") if r["step"] == 1]
    for name in NAMES:
        assert record[name] == pytest.approx(alone[0][name], rel=1e-7), name
