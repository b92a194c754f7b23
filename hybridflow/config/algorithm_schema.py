"""The keys of the `algorithm` block: types, defaults and meanings, as `schema` has them for the rest.

What null stands for is the recipe's that `algorithm.name` names (`recipe`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridflow.config.words import (
    AlgorithmName,
    CorrectionHow,
    CorrectionLevel,
    KLEstimatorName,
    KLWhere,
    LossReduction,
)


@dataclass(frozen=True)
class ClipConfig:
    """The clip range of the policy ratio: [1 - low, 1 + high]."""

    low: float | None = None
    """Lower side; 1: none. null: the algorithm's (0.2 of ppo and grpo)."""
    high: float | None = None
    """Upper side. null: the algorithm's (0.2 of ppo and grpo)."""
    dual: float | None = None
    """Bound on the loss of tokens with a negative advantage (dual clip of ppo's loss; > 1). null: off."""


@dataclass(frozen=True)
class KLConfig:
    """The penalty on the distance to the reference."""

    where: KLWhere | None = None
    """none (no reference is held) | reward (subtracted from it) | loss (a term of it). null: the algorithm's."""
    estimator: KLEstimatorName | None = None
    """Per-token estimator: k1 | k2 | k3. null: the algorithm's, mostly k1, which as a loss has no useful gradient."""
    coef: float = 0.01
    """Weight of the penalty; its start where a target is given."""
    target: float | None = None
    """KL in nats per rollout that the coefficient is steered to (where: reward; Ziegler 2019). null: it is fixed."""


@dataclass(frozen=True)
class CorrectionConfig:
    """Importance weights for tokens whose log-prob the generator saw differently: another engine, or older weights."""

    level: CorrectionLevel = CorrectionLevel.NONE
    """none | token (each its own ratio of trainer to generator) | sequence (the product over the response)."""
    how: CorrectionHow = CorrectionHow.TRUNCATE
    """truncate (at most high) | mask (0 outside [low, high])."""
    low: float = 0.5
    """Least ratio that is not masked (mask)."""
    high: float = 2.0
    """Greatest weight (truncate), greatest ratio that is not masked (mask)."""


@dataclass(frozen=True)
class SafeConfig:
    """The bound on the cost and the multiplier that holds it (safe_rlhf)."""

    cost_limit: float = 0.0
    """Mean cost of a response that is still allowed, in units of the cost."""
    multiplier: float = 1.0
    """Where the Lagrange multiplier starts; it weighs the cost against the reward."""
    multiplier_lr: float = 0.1
    """Step of the multiplier's logarithm, per unit of cost above the limit and of the multiplier."""
    pretrain_coef: float = 0.0
    """Weight of a supervised loss on right answers in every optimizer step of the actor (PPO-ptx). 0: none."""
    pretrain_batch_size: int = 16
    """Pairs of prompt and right answer, of the training data, in an optimizer step."""


@dataclass(frozen=True)
class CostConfig:
    """Where costs come from when there is no cost model (safe_rlhf)."""

    function: str | None = None
    """file.py:function, called as reward.function is; what it returns is a cost: less is better."""
    timeout_s: float = 10.0
    """Longest time for one row's cost; a row that takes longer is counted as timed out and not trained."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """The learning algorithm."""

    name: AlgorithmName = AlgorithmName.PPO
    """ppo | grpo | dr_grpo | dapo | rloo | reinforce_pp | reinforce_pp_baseline | remax | gspo | cispo | safe_rlhf."""
    advantage: str | None = None
    """Advantage estimator: a name of README's table, or file.py:function. null: the algorithm's."""
    policy_loss: str | None = None
    """Policy loss: ppo | reinforce | gspo | gspo_token | cispo, or file.py:function. null: the algorithm's."""
    gamma: float = 1.0
    """Discount of later rewards (gae, reinforce_pp)."""
    lam: float = 0.95
    """Lambda of generalised advantage estimation (gae)."""
    clip: ClipConfig = field(default_factory=ClipConfig)
    """Clip range of the policy loss."""
    value_clip: float | None = 0.2
    """Clip range of the value loss around the values of the rollout (with a critic). null: no clipping."""
    value_loss_coef: float = 1.0
    """Factor of the value loss (with a critic)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl: KLConfig = field(default_factory=KLConfig)
    """The KL penalty."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Importance correction between generator and trainer."""
    loss_reduction: LossReduction | None = None
    """token-mean | seq-mean-token-mean | seq-mean-token-sum | constant-length (see README). null: the algorithm's."""
    constant_length: int | None = None
    """Tokens that constant-length divides a row's sum by. null: generation.max_new_tokens."""
    normalise_advantages: bool | None = None
    """Shift and scale a step's advantages to mean 0 and variance 1 over its tokens. null: the algorithm's."""
    grpo_std_normalise: bool = True
    """Divide the advantages of a group by the standard deviation of its rewards (advantage grpo)."""
    resample_rounds: int | None = None
    """Rounds, at most, to replace prompts whose samples have equal rewards (DAPO). 0: none. null: the algorithm's."""
    safe: SafeConfig = field(default_factory=SafeConfig)
    """The bound on the cost."""
    overlong_buffer: int | None = None
    """Tokens before max_new_tokens over which a reward falls by 1 in all (DAPO). 0: none. null: the algorithm's."""
