"""What the contestants of `bench step` share: prompts, lengths, the reward, the settings of the algorithms.

Owns how many operations a step needs at least. It runs no model, and imports nothing that a peer's environment lacks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

VOCAB, PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 4096, 4, 8, 32, 64
ROWS = PROMPTS * SAMPLES
PAD, END = VOCAB, VOCAB + 1  # no model here has them: nothing is padding by accident, and nothing ends a response
LR, BETAS, EPS, CLIP, CLIP_GRAD_NORM = 1e-6, (0.9, 0.95), 1e-8, 0.2, 1.0
GAMMA, LAM, KL_COEF, VALUE_CLIP = 1.0, 0.95, 0.05, 0.2  # PPO's
POLICY, CRITIC, TOKENIZER = "policy", "critic", "tokenizer"  # folders
PHASES = ("generate", "score", "update")
CHECKED = -1  # the number of the prompts whose gradients are compared

Ids = list[list[int]]
Spent = dict[str, float]  # CPU seconds by phase


def prompts(number: int) -> Ids:
    """The different prompts of step `number`, each of which is answered `SAMPLES` times."""
    draw = torch.Generator().manual_seed(number + 1000)
    return torch.randint(VOCAB, (PROMPTS, PROMPT_TOKENS), generator=draw).tolist()


def responses(number: int) -> Ids:
    """Answers for comparing gradients, those to a prompt one after another."""
    draw = torch.Generator().manual_seed(number + 2000)
    return torch.randint(VOCAB, (ROWS, NEW_TOKENS), generator=draw).tolist()


def text_of(ids: list[int]) -> str:
    """The words of a text. Example: `text_of([7, 0])` is `"w7 w0"`."""
    return " ".join(f"w{token}" for token in ids)


def score_text(text: str) -> float:
    """The reward of a response: the share of even words."""
    return score_ids([int(word[1:]) for word in text.split()])


def score_ids(ids: list[int]) -> float:
    """The same of its tokens."""
    return sum(token % 2 == 0 for token in ids) / len(ids)


def write_tokenizer(folder: Path) -> None:
    """A Hugging Face tokenizer whose words are `text_of`'s."""
    folder.mkdir()
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": id_, "content": word} | special for id_, word in ((PAD, "<pad>"), (END, "<end>"))]
    words = {f"w{token}": token for token in range(VOCAB)}
    tokenizer = {"version": "1.0", "added_tokens": added, "normalizer": None, "post_processor": None, "decoder": None,
                 "pre_tokenizer": {"type": "WhitespaceSplit"}, "truncation": None, "padding": None,
                 "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<end>",
              "padding_side": "left", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class Work:
    """Operations that a step needs at least, in each phase: those of products alone, two for each multiplication.

    A prompt is computed once for all of its samples; the last token of a response is read by nobody; logits exist where
    a token is predicted only; a backward is twice its forward; nothing is computed twice; and PPO's critic gives old
    values by the forward of its update.
    """

    generate: float
    score: float
    update: float

    @property
    def total(self) -> float:
        return self.generate + self.score + self.update


def least_work(algorithm: str, body: int, head: int, attention: int) -> Work:
    """Of GRPO, or of PPO with a reference.

    Args:
        body, head: weights that a token is multiplied with, in the layers and in the head.
        attention: multiplications for each pair of a query and a key in all layers.
    """
    answered = NEW_TOKENS - 1
    tokens = PROMPTS * PROMPT_TOKENS + ROWS * answered
    within = PROMPTS * _pairs(PROMPT_TOKENS) + ROWS * _pairs(answered)
    pairs = within + ROWS * answered * PROMPT_TOKENS
    layers = 2.0 * (body * tokens + attention * pairs)
    logits = 2.0 * head * ROWS * NEW_TOKENS
    policy = layers + logits
    if algorithm == "grpo":
        return Work(policy, 0.0, 3 * policy)
    return Work(policy, policy, 3 * policy + 3 * layers)


def _pairs(length: int) -> int:
    """Of a query and a key that it sees, in a row of this length."""
    return length * (length + 1) // 2
