"""`hybridflow generate`: answers to held-out prompts as JSON lines, under the sampling settings of the config."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from hybridflow.commands.job import Job
from hybridflow.config.schema import Config
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.records import prompt_text
from hybridflow.exchange import share_json
from hybridflow.observe.trace import Trace
from hybridflow.parallel.world import World
from hybridflow.response_text import answer_text
from hybridflow.trainer.build import Builder
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.prompts import held_out_prompts, read_records, require_same
from hybridflow.trainer.rollout import answer


def prepare(config: Config) -> Job:
    """Read everything that the config names; the job then answers evaluation.prompts held-out prompts into
    logging.dir/generations.jsonl, on all launched ranks.
    """
    inputs = Inputs.read(config, scores=False)
    prompts = held_out_prompts(config, read_records(config), inputs.tokenizer, inputs.model.vocab_size)
    return partial(_run, inputs, prompts)


def _run(inputs: Inputs, prompts: tuple[TokenisedPrompt, ...]) -> None:
    with closing(World.from_env(inputs.config.train.timeout_s)) as world:
        require_same(world, [prompt.record for prompt in prompts])
        rows = _answers(inputs, prompts, world)
        if world.rank == 0:
            _write(Path(inputs.config.logging.dir) / "generations.jsonl", rows)


def _answers(inputs: Inputs, prompts: tuple[TokenisedPrompt, ...], world: World) -> list[dict]:
    config, tokenizer, ends = inputs.config, inputs.tokenizer, inputs.ends
    builder, samples = Builder(inputs, world, Trace()), config.generation.samples_per_prompt
    generator, mesh = builder.generator()
    rollout = answer(generator, mesh, prompts, builder.sampling(), samples=samples, seed=config.train.seed,
                     version=None, dtype=torch.promote_types(builder.dtype, torch.float32))
    log_probs = rollout.batch.columns.rollout_log_probs.split(list(rollout.batch.home_lengths(world)))
    mine = []
    for row, sample, values in zip(rollout.batch.home[world.rank], rollout.batch.samples, log_probs):
        record = prompts[row // samples].record
        mine.append({"row": row, "sample": row % samples, "prompt": prompt_text(record.prompt),
                     "response": answer_text(tokenizer, sample.response, ends), "ground_truth": record.ground_truth,
                     "finish_reason": "stop" if sample.response[-1] in ends.ids else "length",
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
