"""TRL's PPOTrainer as a contestant of `bench step`: policy and critic are trained, the reward is a stub.

Owns nothing of ours, as `step_trl`. TRL 1.8.0 has it as trl.experimental.ppo.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

from hybridflow.bench import step_case as case
from hybridflow.bench.step_trl import STEPS, TrlTrainer, common_settings, model_of


class Ppo(TrlTrainer):
    """One epoch, one mini-batch. Each prompt is in the data as often as it is answered."""

    def make(self) -> PPOTrainer:
        policy = self.folder / case.POLICY
        ppo_trainer.batch_generation = self.clock.around("generate", self._answers(ppo_trainer.batch_generation))
        for name in ("forward", "get_reward", "selective_log_softmax"):
            setattr(ppo_trainer, name, self._scores(getattr(ppo_trainer, name)))
        return PPOTrainer(_config(str(self.folder / "trl")), self.tokenizer, model_of(policy), model_of(policy),
                          EvenTokens(), _dataset(), _critic(self.folder / case.CRITIC), callbacks=[self.turns])

    def named_weights(self) -> dict[str, nn.Parameter]:
        model = self.trainer.model
        policy = {f"policy.{name}": weight for name, weight in model.policy.named_parameters()}
        critic = {f"critic.{name}".replace("critic.score.", "critic.value_head."): weight
                  for name, weight in model.value_model.named_parameters()}
        return policy | critic

    def _scores(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What runs without gradients is scoring."""
        scoring = self.clock.around("score", function)

        def run(*args: Any, **kwargs: Any) -> Any:
            return (function if torch.is_grad_enabled() else scoring)(*args, **kwargs)
        return run

    def _answers(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """With the given responses: each prompt's to that prompt, wherever the data's order has it."""
        def answers(model: nn.Module, queries: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
            if not self.given:
                return generate(model, queries, *args)
            asked, known = case.prompts(case.CHECKED), case.responses(case.CHECKED)
            left = {tuple(ids): known[i * case.SAMPLES:(i + 1) * case.SAMPLES] for i, ids in enumerate(asked)}
            whole = torch.cat([queries, torch.tensor([left[tuple(ids)].pop() for ids in queries.tolist()])], 1)
            with torch.no_grad():
                return whole, model(whole).logits[:, case.PROMPT_TOKENS - 1 : -1]
        return answers


class EvenTokens(nn.Module):
    """A reward model in form, which scores as `case.score_ids` and costs next to nothing."""

    base_model_prefix = "backbone"

    def backbone(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        """Shares of even tokens stand where the last hidden states would."""
        share = (input_ids[:, case.PROMPT_TOKENS:] % 2 == 0).float().mean(1)
        return SimpleNamespace(hidden_states=[share[:, None, None].expand(*input_ids.shape, 1)])

    def score(self, hidden: Tensor) -> Tensor:
        return hidden


def _critic(folder: Path) -> PreTrainedModel:
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32,
                                                               attn_implementation="sdpa")
    head = load_file(next(folder.glob("*.safetensors")))["value_head.weight"]
    model.score.weight.data.copy_(head.view_as(model.score.weight))
    model.config.pad_token_id = case.PAD
    return model


def _config(folder: str) -> PPOConfig:
    return PPOConfig(response_length=case.NEW_TOKENS, temperature=1.0, num_ppo_epochs=1, num_mini_batches=1,
                     total_episodes=case.ROWS * STEPS, local_rollout_forward_batch_size=case.ROWS,
                     num_sample_generations=0, kl_coef=case.KL_COEF, kl_estimator="k1", cliprange=case.CLIP,
                     cliprange_value=case.VALUE_CLIP, vf_coef=1.0, gamma=case.GAMMA, lam=case.LAM,
                     whiten_rewards=False, missing_eos_penalty=None, **common_settings(folder))


def _dataset() -> Dataset:
    return Dataset.from_dict({"input_ids": [ids for ids in case.prompts(case.CHECKED) for _ in range(case.SAMPLES)]})
