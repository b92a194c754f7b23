"""`hybridflow generate`: answers to held-out prompts as JSON lines, under the sampling settings of the config."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from hybridflow.config.schema import Config
from hybridflow.data.records import prompt_text
from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.exchange import share_json
from hybridflow.observe.trace import Trace
from hybridflow.parallel.world import World
from hybridflow.trainer.build import Builder
from hybridflow.trainer.prompts import held_out_prompts, read_records
from hybridflow.trainer.reward_source import answer_text
from hybridflow.trainer.rollout import answer


def run(config: Config) -> None:
    """Answer evaluation.prompts held-out prompts into logging.dir/generations.jsonl. Collective."""
    world = World.from_env(config.train.timeout_s)
    try:
        rows = _answers(config, world)
        if world.rank == 0:
            _write(Path(config.logging.dir) / "generations.jsonl", rows)
    finally:
        world.close()


def _answers(config: Config, world: World) -> list[dict]:
    tokenizer = open_tokenizer(config.model.tokenizer or config.model.path)
    builder = Builder(config, world, tokenizer, Trace())
    generator, mesh = builder.generator()
    model = builder.actor_model()
    stop_ids, samples = builder.stop_ids(model), config.generation.samples_per_prompt
    prompts = held_out_prompts(config, read_records(config, world), tokenizer, model.vocab_size)
    rollout = answer(generator, mesh, prompts, builder.sampling(stop_ids), samples=samples, seed=config.train.seed,
                     version=None, dtype=torch.promote_types(builder.dtype, torch.float32))
    log_probs = rollout.batch.columns.rollout_log_probs.split(list(rollout.batch.home_lengths(world)))
    mine = []
    for row, sample, values in zip(rollout.batch.home[world.rank], rollout.batch.samples, log_probs):
        record = prompts[row // samples].record
        mine.append({"row": row, "sample": row % samples, "prompt": prompt_text(record.prompt),
                     "response": answer_text(tokenizer, sample.response, stop_ids), "ground_truth": record.ground_truth,
                     "finish_reason": "stop" if sample.response[-1] in stop_ids else "length",
                     "prompt_ids": list(sample.prompt), "response_ids": list(sample.response),
                     "log_probs": values.tolist()})
    return sorted((row for rows in share_json(world, mine) for row in rows), key=lambda row: row["row"])


def _write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            print(f"{row['prompt']!r} -> {row['response']!r}")
    print(f"{len(rows)} answers in {path}")
