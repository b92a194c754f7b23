"""The keys of the `model` block, and of every layout: type, default and, in the line under it, what a key does.

See `schema`, which holds the rest; it checks and derives nothing either.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridflow.config.words import MixedPrecision, ModelFamily


@dataclass(frozen=True)
class LayoutConfig:
    """How a role that trains or scores is split. Example: tp 2, cp 1, pp 2 on 8 ranks leaves dp 2."""

    tp: int = 1
    """Tensor parallel degree: each weight matrix is cut in this many parts. Keep it inside a node."""
    pp: int = 1
    """Pipeline parallel degree: the layers are cut in this many stages. Stages may lie on different nodes."""
    vpp: int = 1
    """Chunks of layers that each pipeline stage has: 2 or more with train.schedule interleaved, 2 with zb-v, else 1."""
    cp: int = 1
    """Context parallel degree: the tokens of each row are cut over this many ranks. For rows too long for one."""
    dp: int | None = None
    """Data parallel degree: number of replicas. null: what is left, world size / (tp x cp x pp). Checked if given."""
    sequence_parallel: bool = False
    """Cut activations between tensor-parallel layers by tokens: less memory, the same bytes. Does nothing at tp 1."""
    layers_per_stage: list[int] | None = None
    """Layers of each pipeline stage, for uneven cuts; with vpp of each chunk, in the model's order. null: even."""


@dataclass(frozen=True)
class PlacementConfig:
    """Which ranks each role has, e.g. 0-3 or 0,2,5-7. Roles with the same ranks take turns, others overlap."""

    actor: int | str | None = None
    """Ranks on which the actor trains. null: all."""
    generation: int | str | None = None
    """Ranks on which the actor generates. null: those on which it trains."""
    critic: int | str | None = None
    """Ranks of the critic. null: all."""
    reference: int | str | None = None
    """Ranks of the reference. null: all."""
    reward: int | str | None = None
    """Ranks of the reward model. null: all."""
    cost: int | str | None = None
    """Ranks of the cost model (safe_rlhf). null: all."""
    cost_critic: int | str | None = None
    """Ranks of the critic of costs (safe_rlhf). null: all."""


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a model that starts from random weights."""

    family: ModelFamily = ModelFamily.LLAMA
    """Architecture: llama | qwen2 | qwen3 (dense)."""
    vocab_size: int | None = None
    """Rows of the embedding. null: the size of the tokenizer's vocabulary."""
    hidden_size: int = 128
    """Width of the residual stream."""
    intermediate_size: int = 344
    """Width of the SwiGLU layer."""
    num_layers: int = 4
    """Decoder layers, over all pipeline stages."""
    num_heads: int = 4
    """Query heads, over all tensor-parallel ranks."""
    num_kv_heads: int | None = None
    """Key/value heads (grouped-query attention). null: num_heads."""
    head_dim: int | None = None
    """Width of one head. null: hidden_size / num_heads."""
    tie_word_embeddings: bool = False
    """Use the embedding as the output head."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding."""
    max_position_embeddings: int = 2048
    """Longest sequence, prompt and response together."""


@dataclass(frozen=True)
class CriticConfig:
    """The value model of PPO."""

    path: str | None = None
    """Hugging Face folder of the critic's start. null: the actor's start with a fresh value head."""
    layout: LayoutConfig | None = None
    """The critic's own layout. null: train.layout."""


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen copy of the actor's start against which the KL is measured (algorithm.kl.where)."""

    layout: LayoutConfig | None = None
    """The reference's own layout. null: train.layout."""


@dataclass(frozen=True)
class RewardModelConfig:
    """A sequence classifier that scores whole rollouts: a decoder on a mesh, or any other whole on each rank."""

    path: str | None = None
    """Hugging Face folder of a *ForSequenceClassification (never downloaded). null: the reward block says."""
    layout: LayoutConfig | None = None
    """The layout of a decoder (llama, qwen2, qwen3). null: train.layout."""
    label: int | None = None
    """Label whose logit is the score, from 0 (no decoders). null: the only one."""
    pair: bool = False
    """Give prompt and response as the two texts of a pair, not as one or by the chat template (no decoders)."""
    dtype: MixedPrecision | None = None
    """Precision: "no" (fp32) | bf16 | fp16 | fp64 (no decoders). null: train.mixed_precision."""
    micro_batch_size: int = 8
    """Rows that one rank scores at once, of like lengths (no decoders). Memory and speed only."""


@dataclass(frozen=True)
class CostModelConfig:
    """A sequence classifier with one output that says what a whole rollout costs."""

    path: str | None = None
    """Hugging Face folder (a *ForSequenceClassification with one label). null: costs come from the cost block."""
    layout: LayoutConfig | None = None
    """The cost model's own layout. null: train.layout."""


@dataclass(frozen=True)
class ModelsConfig:
    """Which models take part, and where they start from."""

    path: str | None = None
    """Hugging Face folder with the actor's weights. null: random weights of the shape in model.spec."""
    tokenizer: str | None = None
    """Hugging Face folder or sentencepiece .model file. null: model.path."""
    spec: ModelSpec | None = None
    """Shape of a model that starts from random weights; only where model.path is null."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model (ppo only)."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """The KL reference (only where algorithm.kl.where is not none)."""
    cost_model: CostModelConfig = field(default_factory=CostModelConfig)
    """The cost model, if any (safe_rlhf only)."""
    cost_critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model of costs (safe_rlhf only)."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """The reward model, if any."""
