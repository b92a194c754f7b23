"""Small random transformers models that the tests of this folder import, and the reference computations on them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen3Config,
)

SIZES = dict(vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2)
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=16)


def hf_config(kind: str):
    """llama: llama3 rope scaling, biases nowhere, untied. qwen2: q/k/v biases, tied. qwen3: q/k norm, wide heads."""
    if kind == "llama":
        return LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE)
    if kind == "qwen2":
        return Qwen2Config(**SIZES, tie_word_embeddings=True, rope_parameters=dict(rope_type="default",
                                                                                   rope_theta=1000.0))
    return Qwen3Config(**SIZES, head_dim=12, rope_parameters=dict(rope_type="default", rope_theta=1000.0))


def save_random(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **save) -> Path:
    """Save a random model of `kind`, with every bias and norm away from its usual 0 and 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(kind))
    return _save(model, folder, dtype, **save)


def save_random_classifier(folder: Path) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(**SIZES, num_labels=1, pad_token_id=0)
    return _save(LlamaForSequenceClassification(config), folder, torch.float32)


def _save(model, folder: Path, dtype: torch.dtype, **save) -> Path:
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() == 1 else 0.15
            parameter.add_(torch.randn_like(parameter) * spread)
    model.to(dtype).save_pretrained(folder, **save)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
    return folder


def reference_logits(folder: Path, rows: list[list[int]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`[tokens, vocab]` of the rows, one after another, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return torch.cat([model(torch.tensor([row])).logits[0] for row in rows])
