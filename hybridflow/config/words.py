"""The words that a config may hold, one Enum a key. Strings come in at the edge (`load`) and stop there."""

from enum import Enum


class ModelFamily(Enum):
    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


class ScheduleName(Enum):
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZB_V = "zb-v"


class Recompute(Enum):
    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class MixedPrecision(Enum):
    NO = "no"
    BF16 = "bf16"
    FP16 = "fp16"
    FP64 = "fp64"


class ReduceDtype(Enum):
    FP32 = "fp32"
    BF16 = "bf16"


class Decay(Enum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class AlgorithmName(Enum):
    PPO = "ppo"
    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    DAPO = "dapo"
    RLOO = "rloo"
    REINFORCE_PP = "reinforce_pp"
    REINFORCE_PP_BASELINE = "reinforce_pp_baseline"
    REMAX = "remax"
    GSPO = "gspo"
    CISPO = "cispo"
    SAFE_RLHF = "safe_rlhf"


class CorrectionLevel(Enum):
    NONE = "none"
    TOKEN = "token"
    SEQUENCE = "sequence"


class CorrectionHow(Enum):
    TRUNCATE = "truncate"
    MASK = "mask"


class KLWhere(Enum):
    NONE = "none"
    REWARD = "reward"
    LOSS = "loss"


class KLEstimatorName(Enum):
    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class EngineName(Enum):
    OWN = "own"
    VLLM = "vllm"


class GenerationWeights(Enum):
    SHARED = "shared"
    PACKED = "packed"


class Overlap(Enum):
    NONE = "none"
    ONE_STEP_OFF = "one_step_off"
    PARTIAL = "partial"


class GenerationBalance(Enum):
    OWN = "own"
    SHARED = "shared"


class ReshardCheck(Enum):
    ALL = "all"
    SAMPLED = "sampled"
    OFF = "off"


class LossReduction(Enum):
    TOKEN_MEAN = "token-mean"
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    CONSTANT_LENGTH = "constant-length"


class DataSource(Enum):
    REASONING_GYM = "reasoning_gym"
    JSONL = "jsonl"
    PARQUET = "parquet"
    MIXTURE = "mixture"


class Overlong(Enum):
    ERROR = "error"
    DROP = "drop"
    TRUNCATE_LEFT = "truncate_left"
    TRUNCATE_RIGHT = "truncate_right"


class PreferenceLoss(Enum):
    SIGMOID = "sigmoid"
    IPO = "ipo"


class RejectedAnswer(Enum):
    OTHER = "other"
    PERTURBED = "perturbed"


class GymScoring(Enum):
    EXACT = "exact"
    PARTIAL = "partial"


class FaultAction(Enum):
    DROP = "drop"
    ZERO = "zero"
    ERROR = "error"


class WandbMode(Enum):
    OFFLINE = "offline"
    ONLINE = "online"
    OFF = "off"


class OnToolError(Enum):
    OBSERVE = "observe"
    END = "end"
