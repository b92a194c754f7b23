"""TRL's GRPOTrainer as a contestant of `bench step`.

Owns nothing of ours, as `step_trl`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from hybridflow.bench import step_case as case
from hybridflow.bench.step_trl import STEPS, TrlTrainer, common_settings, model_of


class Grpo(TrlTrainer):
    """No reference (beta 0) and one update a rollout, for which TRL computes no old log-probs either."""

    def make(self) -> GRPOTrainer:
        trainer = GRPOTrainer(model_of(self.folder / case.POLICY), _rewards, _config(str(self.folder / "trl")),
                              _dataset(), processing_class=self.tokenizer, callbacks=[self.turns])
        trainer._generate_single_turn = self._answers(trainer._generate_single_turn)
        trainer._generate = self.clock.around("generate", trainer._generate)
        trainer._generate_and_score_completions = self.clock.around("score", trainer._generate_and_score_completions)
        return trainer

    def named_weights(self) -> dict[str, torch.nn.Parameter]:
        return {f"policy.{name}": weight for name, weight in self.trainer.model.named_parameters()}

    def _answers(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def answers(*args: Any, **kwargs: Any) -> Any:
            return (case.responses(case.CHECKED), None) if self.given else generate(*args, **kwargs)
        return answers


def _config(folder: str) -> GRPOConfig:
    return GRPOConfig(num_generations=case.SAMPLES, max_completion_length=case.NEW_TOKENS, beta=0.0, temperature=1.0,
                      top_k=0, top_p=1.0, epsilon=case.CLIP, scale_rewards="group", loss_type="dapo",
                      max_steps=STEPS, max_grad_norm=case.CLIP_GRAD_NORM, shuffle_dataset=False,
                      **common_settings(folder))


def _dataset() -> Dataset:
    numbers = (case.CHECKED, *range(STEPS))
    return Dataset.from_dict({"prompt": [case.text_of(ids) for number in numbers for ids in case.prompts(number)]})


def _rewards(completions: list[str], **_: Any) -> list[float]:
    return [case.score_text(text) for text in completions]
