"""What a decoder looks like: `ModelConfig`, read from and written to a Hugging Face config.json.

Owns the mapping of keys and what is refused. It reads json and safetensors headers, never weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from hybridflow.models.rope import RopeConfig
from hybridflow.models.safetensors_files import read_json_object, stored_dtypes


class Family(Enum):
    """A dense decoder family, by the `model_type` of its config.json."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


class Head(Enum):
    """What the last stage computes at a token: next-token log-probs, a value, or a sequence's score."""

    LANGUAGE_MODEL = "language_model"
    VALUE = "value"
    SCORE = "score"


CLASS_PREFIX = {Family.LLAMA: "Llama", Family.QWEN2: "Qwen2", Family.QWEN3: "Qwen3"}
SUPPORTED_CLASSES = ("ForCausalLM", "ForSequenceClassification")
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder: RMSNorm, rotary positions, SwiGLU, grouped key-value heads.

    Attributes:
        head_dim: width of one head; heads x head_dim may differ from hidden_size.
        eos_token_ids: every id that ends a response; empty where the config names none.
        initializer_range: standard deviation of fresh weights.
        hf: the config.json as it was read, which export writes back; empty for a config made from a spec.
        file_dtype: dtype of the weights in the files, which export keeps; None: whatever the storages have.
        tensor_dtypes: tensors of the files whose dtype differs from `file_dtype`.
    Example: `ModelConfig(Family.LLAMA, 512, 64, 128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)`.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_position_embeddings: int = 2048
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    initializer_range: float = 0.02
    hf: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    file_dtype: torch.dtype | None = None
    tensor_dtypes: dict[str, torch.dtype] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_hf_folder(cls, path: str | Path) -> ModelConfig:
        """Read `path`/config.json, and the headers of the weight files beside it.

        Raises:
            ValueError: no such file, or a model that is not supported; names the key, its value and the rule.
        """
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ValueError(f"{path}: no config.json there; give a folder saved by transformers' save_pretrained")
        try:
            config = cls.from_hf_dict(read_json_object(file))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        stored = stored_dtypes(Path(path))
        usual = max(dict.fromkeys(stored.values()), key=list(stored.values()).count, default=config.file_dtype)
        unusual = {name: dtype for name, dtype in stored.items() if dtype != usual}
        return replace(config, file_dtype=usual, tensor_dtypes=unusual)

    @classmethod
    def from_hf_dict(cls, hf: dict[str, Any]) -> ModelConfig:
        """Read the content of a config.json.

        Raises:
            ValueError: all faults in one message, each with its key and value.
        """
        family = _family(hf)
        faults = [f"{key}: missing" for key in REQUIRED if hf.get(key) is None] + _not_counts(hf) + _unsupported(hf)
        if faults:
            raise ValueError("; ".join(faults))
        heads, head_dim = hf["num_attention_heads"], hf.get("head_dim") or _default_head_dim(hf, family)
        if head_dim % 2:
            raise ValueError(f"head_dim: {head_dim}: rotary positions turn pairs of numbers; only an even one is "
                             "supported")
        max_positions = hf.get("max_position_embeddings") or (2048 if family is Family.LLAMA else 32768)
        attention_bias = bool(hf.get("attention_bias", False)) and family is not Family.QWEN2
        eos = hf.get("eos_token_id")
        return cls(
            family=family,
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_hf(hf, max_positions),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or family is Family.QWEN2,
            o_bias=attention_bias,
            mlp_bias=bool(hf.get("mlp_bias", False)) and family is Family.LLAMA,
            qk_norm=family is Family.QWEN3,
            max_position_embeddings=max_positions,
            bos_token_id=hf.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            initializer_range=hf.get("initializer_range", 0.02),
            hf=dict(hf),
            file_dtype=_dtype(hf),
        )

    def as_classifier(self) -> ModelConfig:
        """The same decoder as a sequence classifier with one label, for export under a score head.

        transformers reads a score at the last token that is not pad_token_id. So that it is the row's last token there
        too, the padding is none of the ends; without another one (bos) there is none, and rows are scored one by one.
        """
        hf = self.to_hf_dict()
        pad = hf.get("pad_token_id")
        if pad is None or pad in self.eos_token_ids:
            pad = None if self.bos_token_id in self.eos_token_ids else self.bos_token_id
        hf |= {"architectures": [f"{CLASS_PREFIX[self.family]}ForSequenceClassification"], "pad_token_id": pad,
               "id2label": {"0": "score"}, "label2id": {"score": 0}}
        return replace(self, hf=hf)

    def to_hf_dict(self) -> dict[str, Any]:
        """The config.json of an export: the one that was read, else one made from the fields."""
        if self.hf:
            return dict(self.hf)
        own_biases = {} if self.family is Family.QWEN2 else {"attention_bias": self.qkv_bias}
        if self.family is Family.LLAMA:
            own_biases["mlp_bias"] = self.mlp_bias
        return {
            "architectures": [f"{CLASS_PREFIX[self.family]}ForCausalLM"],
            "model_type": self.family.value,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            **self.rope.to_hf(),
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids) or None,
            "initializer_range": self.initializer_range,
            **own_biases,
        }


def _family(hf: dict[str, Any]) -> Family:
    """The family, by model_type; an architecture outside the supported classes is refused.

    Raises:
        ValueError: names model_type or architectures and what is supported.
    """
    kinds = {family.value: family for family in Family}
    if hf.get("model_type") not in kinds:
        raise ValueError(f"model_type: {hf.get('model_type')!r} is not supported; supported are {', '.join(kinds)} "
                         "(dense)")
    family = kinds[hf["model_type"]]
    classes = [CLASS_PREFIX[family] + suffix for suffix in SUPPORTED_CLASSES]
    wrong = [name for name in hf.get("architectures") or [] if name not in classes]
    if wrong:
        raise ValueError(f"architectures: {wrong[0]!r} is not supported; supported are {', '.join(classes)}")
    return family


def _not_counts(hf: dict[str, Any]) -> list[str]:
    """Faults of keys that must be whole numbers: sizes, from 1, and the ids of end tokens, from 0."""
    eos = hf.get("eos_token_id")
    entries = [(key, hf.get(key), 1) for key in (*REQUIRED, *OPTIONAL_SIZES)]
    entries += [("eos_token_id", token, 0) for token in (eos if isinstance(eos, list) else [eos])]
    return [f"{key}: {value!r} is not a whole number from {least} on" for key, value, least in entries
            if value is not None and (type(value) is not int or value < least)]


def _unsupported(hf: dict[str, Any]) -> list[str]:
    """Faults of a config whose model would compute something else here."""
    faults = []
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        faults.append(f"hidden_act: {hf['hidden_act']!r}: only 'silu' is supported")
    if hf.get("use_sliding_window") or "sliding_attention" in (hf.get("layer_types") or []):
        faults.append("use_sliding_window: sliding-window attention is not supported")
    if hf.get("quantization_config"):
        faults.append("quantization_config: quantised weights are not supported; save the model in bf16 or fp32")
    if hf.get("attention_dropout"):
        faults.append(f"attention_dropout: {hf['attention_dropout']}: only 0.0 is supported")
    faults += [f"{key}: {hf[key]!r} is not a block of settings" for key in ("rope_parameters", "rope_scaling")
               if hf.get(key) and not isinstance(hf[key], dict)]
    experts = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if hf.get(key)]
    return faults + [f"{key}: {hf[key]}: mixtures of experts are not supported" for key in experts]


def _default_head_dim(hf: dict[str, Any], family: Family) -> int:
    return 128 if family is Family.QWEN3 else hf["hidden_size"] // hf["num_attention_heads"]


def _dtype(hf: dict[str, Any]) -> torch.dtype | None:
    """`dtype` (transformers 5) or `torch_dtype` (4), None where the config has neither."""
    name = hf.get("dtype") or hf.get("torch_dtype")
    return None if name is None else DTYPES.get(str(name).removeprefix("torch."))
