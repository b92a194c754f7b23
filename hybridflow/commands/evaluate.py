"""`hybridflow evaluate`: a trained model is asked held-out prompts and its answers scored; the config of a run serves.

Owns what it leaves: evaluation.json, and evaluations.jsonl where answers are kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from hybridflow.commands.job import Job
from hybridflow.config.algorithm_schema import CostConfig
from hybridflow.config.model_schema import ModelsConfig
from hybridflow.config.schema import Config
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.gathering import Gathering
from hybridflow.generation.engines.interface import GenerationEngine
from hybridflow.generation.records import SamplingParams
from hybridflow.observe.jsonl import JsonlFile
from hybridflow.observe.phases import PhaseTimer
from hybridflow.observe.trace import Trace, settle_device
from hybridflow.parallel.mesh import Mesh
from hybridflow.parallel.world import World
from hybridflow.trainer.board import Metrics
from hybridflow.trainer.build import Builder
from hybridflow.trainer.engine_options import DTYPES
from hybridflow.trainer.evaluate import Evaluator, answer_lines, make_evaluator
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.prompts import RunData, held_out_prompts, read_records, require_same_data
from hybridflow.trainer.rewards.inputs import require_parts
from hybridflow.trainer.rollout import Rollout, begin


@dataclass(frozen=True)
class LoadedModel:
    """A model that is not trained, as it answers: an `evaluate.Asker`. `builder` knows how."""

    builder: Builder
    generator: GenerationEngine
    mesh: Mesh
    timer: PhaseTimer

    @property
    def world(self) -> World:
        return self.builder.world

    def sample(self, prompts: Sequence[TokenisedPrompt], params: SamplingParams, samples: int) -> Rollout:
        """Answers; row `i * samples + j` is sample j of prompt i. Collective."""
        config = self.builder.config
        dtype = torch.promote_types(DTYPES[config.train.mixed_precision], torch.float32)
        return begin(self.generator, self.mesh, prompts, params, samples=samples, seed=config.train.seed, version=None,
                     dtype=dtype, balance=self.builder.balance, turns=self.builder.inputs.turns).finish()


def prepare(config: Config) -> Job:
    """Read everything that the config names; the job then asks and scores, on all launched ranks."""
    gathering = Gathering()
    records = gathering.read(read_records, config)
    inputs = gathering.read(Inputs.read, _without_learners(config))
    gathering.finish()
    assert records is not None and inputs is not None
    require_parts(inputs.rewards, (record.data_source for record in records.test))
    held_out = held_out_prompts(config, records, inputs.tokenizer, inputs.model.vocab_size)
    if not held_out:
        raise ValueError("all held-out prompts are too long; set data.max_prompt_length higher")
    return partial(_run, inputs, records, held_out)


def _without_learners(config: Config) -> Config:
    """Nobody asks a critic, or what answers cost."""
    default = ModelsConfig()
    model = replace(config.model, critic=default.critic, cost_critic=default.cost_critic,
                    cost_model=default.cost_model)
    return replace(config, model=model, cost=CostConfig())


def _run(inputs: Inputs, records: RunData, held_out: tuple[TokenisedPrompt, ...]) -> None:
    with ExitStack() as stack:
        world = stack.enter_context(closing(World.from_env(inputs.config.train.timeout_s)))
        stack.callback(inputs.close_tools)
        require_same_data(world, records)
        settle, trace = settle_device(world.device), Trace()
        builder, timer = Builder(inputs, world, trace), PhaseTimer(trace, settle)
        with closing(builder.rewards()) as rewards:
            generator, mesh = builder.generator()
            asker = LoadedModel(builder, generator, mesh, timer)
            evaluator = make_evaluator(inputs, asker, rewards, held_out, builder.sampling())
            metrics = evaluator() | {"time/evaluate": timer.take()["time/evaluate"]}
            if world.rank == 0:
                _write(Path(inputs.config.logging.dir), metrics, evaluator)
                if rewards.last_fault is not None:
                    print(rewards.last_fault)


def _write(folder: Path, metrics: Metrics, evaluator: Evaluator) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluation.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    if evaluator.answers:
        with closing(JsonlFile(folder / "evaluations.jsonl", resume=False)) as file:
            for line in answer_lines(evaluator.answers):
                file.write(line)
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print(f"{name.ljust(width)}  {value:.4g}")
    print(f"{len(evaluator.prompts)} held-out prompts, {evaluator.samples} answers to each: "
          f"{folder / 'evaluation.json'}")
