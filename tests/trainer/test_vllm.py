"""vLLM as the generator of whole commands, where it is installed: its log-probs are the trainer's, step after step."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridflow.bench.generate_options import VLLM_PYTHON
from hybridflow.cli import main
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.weights import canonical_shapes
from tests.trainer.runs import VOCAB, make_tokenizer

ROOT = Path(__file__).parent.parent.parent
PYTHON = os.environ.get(VLLM_PYTHON)
SHAPE = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
         "eos_token_id": 2}
PROMPTS = [{"id": "a", "prompt": "7 + 8 = "}, {"id": "b", "prompt_ids": [1, 260, 261]}]
QUICK = {"VLLM_CPU_CI_ENV": "1", "TORCHDYNAMO_DISABLE": "1"}  # nothing is compiled, which would take minutes
pytestmark = pytest.mark.skipif(not PYTHON, reason=f"{VLLM_PYTHON} does not name an interpreter that has vLLM")


def run(*words: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | QUICK
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


def test_generate_answers_as_our_engine_does_where_nothing_is_drawn(tmp_path: Path):
    make_tokenizer(tmp_path)
    draw = torch.Generator().manual_seed(0)
    shapes = canonical_shapes(ModelConfig.from_hf_dict(SHAPE), Head.LANGUAGE_MODEL)
    save_file({name: torch.randn(shape, generator=draw) * 0.4 for name, shape in shapes.items()},
              tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "run.yaml").write_text(json.dumps({"model": {"path": str(tmp_path)}}))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    words = ("generate", str(tmp_path / "run.yaml"), "--prompts", str(tmp_path / "prompts.jsonl"),
             "generation.max_new_tokens=12", "generation.temperature=0", "generation.stop=['no such text']")
    run("hybridflow", *words, "--out", str(tmp_path / "vllm.jsonl"), "generation.engine=vllm")
    assert main([*words, "--out", str(tmp_path / "own.jsonl")]) == 0
    given, own = ([json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
                  for name in ("vllm", "own"))
    assert [line.pop("log_probs") for line in given] == [pytest.approx(line.pop("log_probs"), abs=1e-4) for line in own]
    assert given == own and [line["id"] for line in own] == ["a", "b"]
