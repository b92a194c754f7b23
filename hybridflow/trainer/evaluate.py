"""Held-out prompts answered greedily and scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybridflow.data.loader import TokenisedPrompt
from hybridflow.generation.records import SamplingParams
from hybridflow.observe.phases import Phase
from hybridflow.trainer.dataflow import RewardSource
from hybridflow.trainer.rollout import Sampler


class Evaluator:
    """Asks the current actor. Collective; every rank has the same prompts and gets the same metrics."""

    def __init__(self, sampler: Sampler, rewards: RewardSource, prompts: Sequence[TokenisedPrompt],
                 sampling: SamplingParams) -> None:
        self.sampler, self.rewards, self.prompts = sampler, rewards, prompts
        self.greedy = replace(sampling, temperature=0.0, top_k=0, top_p=1.0)

    def __call__(self) -> dict[str, float]:
        """Accuracy (full reward) and mean reward; a row whose reward failed counts as wrong. {} without prompts."""
        if not self.prompts:
            return {}
        with self.sampler.timer.phase(Phase.EVALUATE):
            rollout = self.sampler.sample(self.prompts, self.greedy, 1)
            scores, _ = self.rewards.score(rollout.batch, self.prompts)
        right, known = scores >= 1.0 - 1e-9, scores[~scores.isnan()]
        mean = known.mean().item() if known.numel() else float("nan")
        return {"eval/accuracy": right.double().mean().item(), "eval/reward_mean": mean}
