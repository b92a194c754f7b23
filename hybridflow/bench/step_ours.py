"""Our trainer as a contestant of `bench step`: `RLTrainer`, whose reward is a function in this process.

Owns the configs, and how a step on given responses gives its gradients. CPU seconds are those of the trainer's phases.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.bench import step_case as case
from hybridflow.config.load import load_config
from hybridflow.config.schema import Config
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.data.records import Prompt, PromptRecord
from hybridflow.engine.native import TrainEngine
from hybridflow.kernels.native_build import NativeLibrary, native_library
from hybridflow.kernels.native_ops import set_threads
from hybridflow.micro_batch import Sample, TokenColumns
from hybridflow.parallel.optimizer import StepInfo
from hybridflow.parallel.state_map import StateKind, state_map
from hybridflow.parallel.world import World
from hybridflow.rewards.function import RewardFunction
from hybridflow.rewards.records import Outcome, RewardRequest, Score
from hybridflow.trainer.inputs import Inputs
from hybridflow.trainer.rl import RLTrainer
from hybridflow.trainer.rollout_source import Experience

IN_PHASE = {"generate": "generate", "reshard": "update", "reward": "score", "reference": "score", "log_probs": "score",
            "values": "score", "update_critic": "update", "update_actor": "update"}


class Trainer:
    """One step after another on the prompts of their numbers."""

    algorithm: str

    def __init__(self, folder: str, precision: str, threads: int) -> None:
        assert precision == "fp32", precision
        torch.set_num_threads(threads)
        if isinstance(native_library(), NativeLibrary):
            set_threads(threads)
        inputs = Inputs.read(config_of(self.algorithm, Path(folder)), Words())
        inputs.rewards[0].scorer.close()  # another one takes its place
        rewards = (replace(inputs.rewards[0], scorer=InProcess()),)
        self._trainer = RLTrainer(replace(inputs, rewards=rewards), World.single(torch.device("cpu")))
        self._trainer.timer.clock = time.process_time
        gc.freeze()

    def step(self, number: int) -> case.Spent:
        """A whole step. What its phases leave over is the update's."""
        start = time.process_time()
        metrics = self._trainer.step(tokenised(number))
        total = time.process_time() - start
        spent = dict.fromkeys(case.PHASES, 0.0)
        for name, phase in IN_PHASE.items():
            spent[phase] += metrics.get(f"time/{name}", 0.0)
        spent["update"] += total - sum(spent.values())
        return spent

    def gradients(self, path: str) -> None:
        """Write those of a step on given responses, without clipping, by role and Hugging Face's name."""
        flow, grads = self._trainer.dataflow, {}
        engines = {"policy": flow.roles.actor.trainer}
        if flow.roles.critic is not None:
            engines["critic"] = flow.roles.critic.trainer
        for role, engine in engines.items():
            read_before_step(engine, role, grads)
        experience, generate = Experience(tokenised(case.CHECKED), self._answered()), flow.source.next
        flow.source.next = lambda *_: experience
        self._trainer.step(experience.prompts)
        flow.source.next = generate
        save_file(grads, path)

    def _answered(self) -> Batch:
        """Rollouts of the given responses, with the policy's own log-probs as those that they were sampled with."""
        asked = [ids for ids in case.prompts(case.CHECKED) for _ in range(case.SAMPLES)]
        samples = tuple(Sample(tuple(prompt), tuple(response))
                        for prompt, response in zip(asked, case.responses(case.CHECKED), strict=True))
        groups = tuple(row // case.SAMPLES for row in range(case.ROWS))
        batch = Batch((case.PROMPT_TOKENS,) * case.ROWS, (case.NEW_TOKENS,) * case.ROWS, groups,
                      (tuple(range(case.ROWS)),), samples, TokenColumns())
        return batch.with_columns(rollout_log_probs=self._trainer.dataflow.roles.actor.answer_tokens(batch))


class Grpo(Trainer):
    algorithm = "grpo"


class Ppo(Trainer):
    algorithm = "ppo"


def config_of(algorithm: str, folder: Path) -> Config:
    """One optimizer step a rollout, all rows in one micro-batch, AdamW; GRPO without a reference, PPO with one."""
    ppo = algorithm == "ppo"
    optimizer = {"lr": case.LR, "betas": list(case.BETAS), "eps": case.EPS,
                 "clip_grad_norm": None if ppo else case.CLIP_GRAD_NORM}
    settings: dict[str, Any] = {"name": algorithm, "clip": {"low": case.CLIP, "high": case.CLIP}}
    if ppo:
        settings |= {"gamma": case.GAMMA, "lam": case.LAM, "value_clip": case.VALUE_CLIP,
                     "kl": {"where": "reward", "estimator": "k1", "coef": case.KL_COEF}}
    model = {"path": str(folder / case.POLICY), "tokenizer": str(folder / case.TOKENIZER)}
    return load_config({
        "model": model | ({"critic": {"path": str(folder / case.CRITIC)}} if ppo else {}),
        "train": {"global_batch_size": case.ROWS, "micro_batch_size": case.ROWS, "optimizer": optimizer},
        "generation": {"samples_per_prompt": case.SAMPLES, "max_new_tokens": case.NEW_TOKENS},
        "algorithm": settings,
        "data": {"prompts_per_step": case.PROMPTS},
        "logging": {"dir": str(folder / "run")},
    }, ())


def tokenised(number: int) -> list[TokenisedPrompt]:
    """The prompts of step `number`."""
    return [TokenisedPrompt((number + 1) * case.PROMPTS + i, tuple(ids), PromptRecord("bench", case.text_of(ids), ""))
            for i, ids in enumerate(case.prompts(number))]


def read_before_step(engine: TrainEngine, role: str, into: dict[str, Tensor]) -> None:
    """Have `engine` put its gradients into `into` whenever its optimizer begins a step."""
    shards = state_map(engine.shard_map, {0: engine.grads.layout()}, (StateKind.MAIN_GRAD,)).shards(0)
    begin = engine.optimizer.begin

    def read_and_begin() -> StepInfo:
        for shard in shards:
            name = shard.box.name.removeprefix(f"{StateKind.MAIN_GRAD.value}/")
            whole = into.setdefault(f"{role}.{name}", torch.zeros(engine.shard_map.shapes[name]))
            whole[shard.box.slices] = shard.view(engine.grads.storages())
        return begin()

    engine.optimizer.begin = read_and_begin


class InProcess(RewardFunction):
    """A reward function without processes of its own, as TRL calls one."""

    def __init__(self) -> None:
        self._outcomes: dict[Hashable, Outcome] = {}

    def submit(self, row_id: Hashable, request: RewardRequest) -> None:
        self._outcomes[row_id] = Score(case.score_text(request.solution))

    def collect(self, row_ids: Sequence[Hashable] | None = None) -> dict[Hashable, Outcome]:
        return {row_id: self._outcomes.pop(row_id) for row_id in list(self._outcomes if row_ids is None else row_ids)}

    def close(self) -> None:
        """Nothing to end."""


class Words:
    """The tokenizer of the bench without a library; no id of it ends a response."""

    vocab_size, eos_id = case.VOCAB, case.END
    stop_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return case.text_of(list(ids))

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        assert isinstance(prompt, str)
        return self.encode(prompt)

    def encode_prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return [self.encode_prompt(prompt) for prompt in prompts]

    def save(self, folder: str | Path) -> tuple[Path, ...]:
        raise NotImplementedError("nothing is exported here")
