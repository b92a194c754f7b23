"""Held-out prompts answered greedily and scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybridflow.crew import Crew
from hybridflow.data.loader import TokenisedPrompt
from hybridflow.generation.records import SamplingParams
from hybridflow.observe.phases import Phase
from hybridflow.trainer.dataflow import RewardSource, judged
from hybridflow.trainer.rollout import Sampler


class Evaluator:
    """Asks the current actor. Collective; every rank has the same prompts and gets the same metrics."""

    def __init__(self, sampler: Sampler, rewards: RewardSource, prompts: Sequence[TokenisedPrompt],
                 sampling: SamplingParams) -> None:
        self.sampler, self.rewards, self.prompts = sampler, rewards, prompts
        self.greedy = replace(sampling, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)

    def __call__(self) -> dict[str, float]:
        """Mean reward, and the share of right answers where an answer can be right; {} without prompts.

        Rows whose reward failed are counted and are in no mean.
        """
        if not self.prompts:
            return {}
        with self.sampler.timer.phase(Phase.EVALUATE):
            rollout = self.sampler.sample(self.prompts, self.greedy, 1)
            scores, _ = judged(self.rewards, rollout.batch, self.prompts, Crew.whole(self.sampler.world))
        known = scores[~scores.isnan()]
        metrics = {"eval/faults": float(len(scores) - len(known))}
        if not len(known):
            return metrics
        if self.rewards.right_score is not None:
            metrics["eval/accuracy"] = (known >= self.rewards.right_score).double().mean().item()
        return metrics | {"eval/reward_mean": known.mean().item()}
