"""Every key of a configuration: its type, its default and, in the line under it, what it does.

Owns the dataclasses; the `model` block and the layouts are in `model_schema`, `algorithm` in `algorithm_schema`, `data`
and `evaluation` in `data_schema`, `preference` in `preference_schema`, `reward` in `reward_schema`, `tools` in
`tools_schema`, the words that a key may hold in `words`. It checks nothing beyond types (`validate` does) and derives
nothing (`layouts`, `batch_math` and `recipe` do). A YAML file names only what differs from here. `describe` makes the
table of keys from the lines under them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridflow.config.algorithm_schema import AlgorithmConfig, CostConfig
from hybridflow.config.data_schema import DataConfig, EvaluationConfig
from hybridflow.config.model_schema import LayoutConfig, ModelsConfig, PlacementConfig
from hybridflow.config.preference_schema import PreferenceConfig
from hybridflow.config.reward_schema import RewardConfig
from hybridflow.config.tools_schema import ToolsConfig
from hybridflow.config.words import (
    Decay,
    EngineName,
    GenerationBalance,
    GenerationWeights,
    MixedPrecision,
    Overlap,
    Recompute,
    ReduceDtype,
    ReshardCheck,
    ScheduleName,
    WandbMode,
)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with fp32 master weights. One step is one global batch."""

    lr: float = 1e-5
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of the two Adam moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; vectors (norms, biases) are never decayed."""
    clip_grad_norm: float | None = 1.0
    """Largest global gradient norm. null: no clipping (the norm is still measured)."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly from 0."""
    decay: Decay = Decay.CONSTANT
    """Shape of the rate after the warm-up, down to min_lr at the last optimizer step: constant | linear | cosine."""
    min_lr: float = 0.0
    """Where linear and cosine decay end."""


@dataclass(frozen=True)
class CriticOptimizerConfig:
    """The critic's optimizer: every null field takes the actor's value from train.optimizer."""

    lr: float | None = None
    """Peak learning rate of the critic. null: the actor's."""
    betas: list[float] | None = None
    """Decay rates of the critic's Adam moments. null: the actor's."""
    eps: float | None = None
    """The critic's Adam eps. null: the actor's."""
    weight_decay: float | None = None
    """The critic's weight decay. null: the actor's."""
    clip_grad_norm: float | None = None
    """The critic's largest gradient norm. null: the actor's."""
    warmup_steps: int | None = None
    """The critic's warm-up. null: the actor's."""
    decay: Decay | None = None
    """The critic's decay. null: the actor's."""
    min_lr: float | None = None
    """The critic's last rate. null: the actor's."""


@dataclass(frozen=True)
class OffloadConfig:
    """What waits in host memory: device memory against time. No number changes."""

    optimizer: bool = False
    """Keep master weights and Adam moments on the host, and take the optimizer step there."""
    roles: bool = False
    """Move the tensors of a role to the host whenever another role has its turn."""


@dataclass(frozen=True)
class TrainConfig:
    """Steps, batches, precision and the training layout."""

    seed: int = 0
    """Seeds everything: random weights, the order of the data, and every sampled token."""
    total_steps: int = 100
    """Steps of the run. One step generates a set of rollouts and trains on it."""
    global_batch_size: int = 64
    """Rollouts in one optimizer step, over all replicas. `sft`, `dpo`, `reward_model`: pairs. `kto`: answers."""
    micro_batch_size: int | None = None
    """Rollouts (`dpo`, `reward_model`: pairs of two) that a replica runs at once. Memory and speed only. null: 8."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches of one replica in one optimizer step. null: derived. If given, the product must be exact."""
    epochs_per_rollout: int = 1
    """Passes over the rollouts of a step."""
    forward_micro_batch_size: int | None = None
    """Rollouts that one replica scores at once (log-probs, values, rewards). null: as in training."""
    micro_batch_tokens: int | None = None
    """Most tokens, prompts included, that one replica runs at once, with micro_batch_size null. null: count rows."""
    forward_micro_batch_tokens: int | None = None
    """Most tokens that one replica scores at once, instead of forward_micro_batch_size. null: as in training."""
    schedule: ScheduleName = ScheduleName.ONE_F_ONE_B
    """Pipeline schedule: gpipe | 1f1b | interleaved | zb-h1 | zb-v (see README). All the same at pp 1."""
    recompute: Recompute = Recompute.NONE
    """Activations that backward computes again: none | selective (cheap ones: norms, SwiGLU) | full (whole layers)."""
    recompute_layers: int | None = None
    """Recompute in the first so many layers of each chunk only. null: in all."""
    zero_stage: int = 1
    """0: replicas keep all optimizer states; 1: they share them out; 2: gradients too, between optimizer steps."""
    reduce_bucket_mb: int = 64
    """Largest piece of gradients that is reduced at once, while backward goes on, in MiB."""
    reduce_dtype: ReduceDtype = ReduceDtype.FP32
    """Gradients on the wire: fp32 (as they are accumulated) | bf16 (half the bytes, rounded)."""
    mixed_precision: MixedPrecision = MixedPrecision.NO
    """Weights and activations: "no" (fp32) | bf16 | fp16 (both with fp32 gradients and master weights) | fp64."""
    loss_scale: float = 65536.0
    """Factor of the loss at the start (fp16 only); it halves at each optimizer step that is not finite."""
    loss_scale_window: int = 1000
    """Finite optimizer steps in a row after which the loss scale doubles (fp16 only)."""
    max_nonfinite_steps: int | None = 20
    """Optimizer steps in a row that may be skipped since they are not finite; one more ends the run. null: any."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """What waits in host memory."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """The actor's training layout, and the default layout of the other roles."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The actor's optimizer."""
    critic_optimizer: CriticOptimizerConfig = field(default_factory=CriticOptimizerConfig)
    """Where the critic's optimizer differs."""
    timeout_s: float = 600.0
    """Longest wait for another rank, in seconds."""


@dataclass(frozen=True)
class GenerationLayoutConfig:
    """How the actor is split while it generates."""

    tp: int = 1
    """Tensor parallel degree of generation; replicas of tp x pp ranks share out the prompts."""
    pp: int = 1
    """Pipeline parallel degree of generation: stages through which as many groups of responses take turns."""
    layers_per_stage: list[int] | None = None
    """Layers of each stage of generation; the last has the head too, which may cost several layers. null: even."""
    within_node: bool = True
    """Keep each tensor group of generation in a node, even where more bytes then move. No effect where none fits."""


@dataclass(frozen=True)
class GenerationConfig:
    """How rollouts are sampled."""

    engine: EngineName = EngineName.OWN
    """Who generates: own | vllm (to be installed by you; each rank has a whole model and an engine of its own)."""
    layout: GenerationLayoutConfig = field(default_factory=GenerationLayoutConfig)
    """The actor's generation layout."""
    balance: GenerationBalance = GenerationBalance.OWN
    """Prompts of a replica: own (dealt out beforehand, by length) | shared (taken from one queue as it gets room)."""
    overlap: Overlap = Overlap.NONE
    """none (weights learn from what they made) | one_step_off (the next batch is made meanwhile) | partial (README)."""
    max_staleness: int = 2
    """overlap partial: steps over which an answer may go on, under newer weights each. 1 is one_step_off."""
    samples_per_prompt: int = 1
    """Responses drawn for each prompt; a group in grpo."""
    max_new_tokens: int = 64
    """Longest response, in tokens."""
    min_new_tokens: int = 0
    """Shortest response, in tokens: nothing ends it before."""
    repetition_penalty: float = 1.0
    """Logits of tokens already in prompt or response are divided by it, negative ones multiplied. 1: off."""
    temperature: float = 1.0
    """Sampling temperature; log-probs are measured under it in training too. 0: greedy (not for training)."""
    top_k: int = 0
    """Sample from the k likeliest tokens. 0: all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that hold this probability. 1: all."""
    min_p: float = 0.0
    """Sample from tokens at least this many times as likely as the likeliest. 0: all."""
    stop: list[int | str] = field(default_factory=list)
    """Token ids, strings that are one token, other strings in a response's text: each ends it. End-of-text does too."""
    max_rows: int | None = None
    """Responses that one replica decodes at once. Memory and speed only. null: 256."""
    max_step_tokens: int = 2048
    """Tokens of one forward of generation: those that decode, and prompt tokens beside them. Memory and speed only."""
    kv_cache_mb: int | None = None
    """Key/value cache of one rank, in MiB. null: half of the device's free memory, or a rank's part of the host's."""
    batch_invariant: bool = False
    """A token's logits depend neither on the rest of the batch nor on the layout; training computes the same bits."""
    reshard_bucket_mb: int = 256
    """Largest piece in flight while weights move to the generation layout, in MiB."""
    weights: GenerationWeights | None = None
    """shared (with training) | packed (a copy; train.offload.roles needs it). null: packed in fp32 or fp64 on a CPU."""
    reshard_check: ReshardCheck = ReshardCheck.SAMPLED
    """Compare checksums after weights moved: all (of every tensor) | sampled (of a sixteenth, in turn) | off."""


@dataclass(frozen=True)
class LoggingConfig:
    """What a run leaves behind. metrics.jsonl is always written."""

    dir: str = "runs/default"
    """Folder of the run: metrics, samples, curve, trace, resolved config, exports."""
    wandb: WandbMode = WandbMode.OFF
    """Weights & Biases: offline (no account needed) | online | off."""
    tensorboard: bool = False
    """Write TensorBoard files too."""
    samples: int = 3
    """Rollouts shown at each step. 0: none."""
    progress: bool = True
    """Live progress bar on rank 0 where the output is a terminal; plain lines elsewhere."""
    trace_step: int | None = None
    """Step (from 1) of which a Chrome/Perfetto trace is written; none if the run ends before it. null: none."""
    verl_names: bool = False
    """Log metrics under verl's names too, by verl's formulas (`hybridflow metrics --verl` lists them)."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Exports of the actor in Hugging Face's format, under logging.dir."""

    export_at_end: bool = True
    """Export after the last step."""
    export_every_steps: int | None = None
    """Export every so many steps as well. null: no."""


@dataclass(frozen=True)
class SftConfig:
    """Supervised warm start: the `sft` command only. It uses the model, train, data and logging blocks too."""

    steps: int = 100
    """Optimizer steps."""
    stop_at_accuracy: float | None = None
    """Stop at the first evaluation whose held-out accuracy reaches this. null: do all steps."""
    tokenizer_vocab_size: int | None = None
    """Train a sentencepiece tokenizer of this size on the data if the file model.tokenizer is missing. null: never."""


@dataclass(frozen=True)
class Config:
    """A whole run. Example: `load_config("configs/ppo_tiny.yaml", ["train.seed=1"]).train.seed == 1`."""

    model: ModelsConfig = field(default_factory=ModelsConfig)
    """The models."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Training."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Ranks of the roles."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """Rollouts."""
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    """Tools that answers may call."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """The algorithm."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Rewards."""
    cost: CostConfig = field(default_factory=CostConfig)
    """Costs."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Logs."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluation."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Exports."""
    sft: SftConfig = field(default_factory=SftConfig)
    """Supervised warm start."""
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    """Preference training."""
