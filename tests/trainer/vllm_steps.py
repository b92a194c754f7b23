"""Two GRPO steps with vLLM as the generator, on the ranks it is launched on. It runs in vLLM's environment.

Example: `python -m tests.trainer.vllm_steps FOLDER` has FOLDER/told.0.json then, of rank 0.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import torch

from hybridflow.parallel.world import World
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.prompts import read_records, training_prompts
from hybridflow.trainer.rl import RLTrainer
from tests.trainer.runs import tiny_config

KEYS = ("generation.engine=vllm", "model.spec.head_dim=32", "train.mixed_precision=no", "algorithm.name=grpo",
        "algorithm.kl={where: none}", "generation.max_rows=8", "generation.kv_cache_mb=32",
        "generation.reshard_check=all")  # vLLM on a CPU attends in no narrower heads
STEPS = 2


def main() -> None:
    folder = Path(sys.argv[1])
    inputs = Inputs.read(tiny_config(folder / "tokenizer.model", folder, (*KEYS, *sys.argv[2:])))
    with closing(World.from_env()) as world, closing(RLTrainer(inputs, world)) as trainer:
        loader = training_prompts(inputs.config, read_records(inputs.config), inputs.tokenizer, inputs.model.vocab_size)
        told = [of_step(trainer, next(loader)) for _ in range(STEPS)]
        (folder / f"told.{world.rank}.json").write_text(json.dumps(told))


def of_step(trainer: RLTrainer, prompts: list) -> dict:
    """What the step's weights were, the answers that came, and how the trainer saw them."""
    storages = trainer.roles.actor.engine.storages
    total = sum(float(tensor.double().abs().sum()) for tensor in storages.values())
    metrics = trainer.step(prompts)
    log_probs = trainer.batch.columns.rollout_log_probs
    return {"weights": total, "gap": metrics["policy/log_prob_gap_max"], "samples": metrics["rollout/samples"],
            "finite": bool(torch.isfinite(log_probs).all()), "tokens": len(log_probs),
            "rows": list(trainer.batch.home[trainer.world.rank])}


if __name__ == "__main__":
    main()
