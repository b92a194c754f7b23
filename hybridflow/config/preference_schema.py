"""The keys of the `preference` block: type, default and, in the line under it, what a key does.

See `schema`, which holds the rest; it checks and derives nothing either.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.config.words import PreferenceLoss, RejectedAnswer


@dataclass(frozen=True)
class PreferenceConfig:
    """Preference training: the `dpo`, `kto` and `reward_model` commands, which use the other blocks as `sft` does."""

    steps: int = 100
    """Optimizer steps."""
    beta: float = 0.1
    """Weight of the KL to the reference (dpo, kto); tau of ipo."""
    loss: PreferenceLoss = PreferenceLoss.SIGMOID
    """Loss of a pair (dpo): sigmoid (DPO) | ipo (squared distance of the log-ratios' difference to 1 / (2 beta))."""
    label_smoothing: float = 0.0
    """Chance that a pair is the wrong way round (dpo with sigmoid: conservative DPO)."""
    nll_coef: float = 0.0
    """Weight of the negative log-prob of chosen answers, under algorithm.loss_reduction (dpo). 0: off."""
    precompute_reference: bool = False
    """Ask the reference about all data before the first step, and hold it no longer (dpo)."""
    desirable_weight: float = 1.0
    """Weight of good answers (kto)."""
    undesirable_weight: float = 1.0
    """Weight of bad answers (kto)."""
    margin_key: str | None = None
    """Key of a pair's row in files that says by how much the chosen score should be ahead (reward_model). null: 0."""
    centre_coef: float = 0.0
    """Weight of the squared sum of a pair's scores, which holds scores near 0 (reward_model)."""
    rejected: RejectedAnswer = RejectedAnswer.OTHER
    """Wrong answers (reasoning_gym only): other (that of another prompt) | perturbed (the right one, changed once)."""
