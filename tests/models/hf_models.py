"""Small random transformers models that the tests of this folder import, and the reference computations on them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
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
    """llama: llama3 rope scaling, biases nowhere, untied. qwen2: q/k/v biases, tied. qwen3: q/k norm, wide heads.
    biased: a llama with every bias there is, tied, and 8 query heads on 2 key-value heads.
    """
    if kind == "biased":
        return LlamaConfig(**SIZES | dict(num_attention_heads=8), attention_bias=True, mlp_bias=True,
                           tie_word_embeddings=True)
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


def save_random_critic(kind: str, folder: Path) -> Path:
    """A critic as this code exports it: a model with a value head and without a language-model head."""
    save_random(kind, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    tensors["value_head.weight"] = torch.randn(1, SIZES["hidden_size"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


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


def reference_gradients(folder: Path, samples, head: str) -> dict[str, torch.Tensor]:
    """fp64 gradients of sum(weight x log-prob of the response), or of sum(weight x value), by transformers.

    head "value" reads hidden states with the folder's `value_head.weight`.
    """
    model = _widened(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train())
    loss = torch.zeros((), dtype=torch.float64)
    value_head = None
    if head == "value":
        value_head = load_file(folder / "model.safetensors")["value_head.weight"].double().requires_grad_()
    for sample, weight in samples:
        ids = torch.tensor([[*sample.prompt, *sample.response]])
        first = len(sample.prompt) - 1
        hidden = model.model(ids).last_hidden_state[0, first:first + len(sample.response)]
        if value_head is None:
            log_probs = model.lm_head(hidden).log_softmax(-1)
            answers = log_probs.gather(1, torch.tensor(sample.response)[:, None])[:, 0]
        else:
            answers = hidden @ value_head[0]
        loss = loss + (weight * answers).sum()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return grads if value_head is None else grads | {"value_head.weight": value_head.grad}


def _widened(model):
    """transformers computes norms and rotations in fp32 whatever the dtype; here they are fp64."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_wide_norm, module)
    model.model.rotary_emb.forward = partial(_wide_rotations, model.model.rotary_emb)
    return model


def _wide_norm(module, x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt() * module.weight


def _wide_rotations(module, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = position_ids[..., None].double() * module.inv_freq.double()
    angles = torch.cat([angles, angles], -1)
    return angles.cos() * module.attention_scaling, angles.sin() * module.attention_scaling
