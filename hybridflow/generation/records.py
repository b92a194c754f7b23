"""What goes into a generation engine and what comes out: frozen records of token ids and log-probs.

Owns no behaviour beyond refusing values that cannot be sampled with. It never holds tensors or text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """Why a response ended: a stop token was sampled (and is its last token), or `max_new_tokens` were."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. Example: `SamplingParams(max_new_tokens=64, temperature=0.7, stop_ids=(2,))`.

    Attributes:
        max_new_tokens: the longest response, in tokens, its stop token included.
        temperature: logits are divided by it; 0 is greedy (the lowest id among equal maxima).
        top_k: only the k most probable tokens can be drawn; 0 is off. Tokens tied with the k-th stay in.
        top_p: only the most probable tokens that together reach this mass can be drawn, the one that crosses it
            included; it is applied after top-k, to what top-k left. 1 is off.
        stop_ids: each of them ends a response, and is its last token.

    Raises:
        ValueError: a value is out of range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        rules = [
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1, such as 64"),
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 (greedy) or more, such as 1.0"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more, such as 50"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1 (off), such as 0.95"),
        ]
        faults = [f"{name} is {value}; it must be {rule}" for name, value, holds, rule in rules if not holds]
        if faults:
            raise ValueError("sampling: " + "; ".join(faults))


@dataclass(frozen=True)
class Prompt:
    """One sample to make. Example: `Prompt(id=12, sample=0, ids=(5, 9, 4))`.

    Attributes:
        id: the global prompt id; with the seed and `sample` it decides every draw.
        sample: which of the prompt's samples this is.
        ids: the prompt's tokens, at least one.
    """

    id: int
    sample: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One finished sample. Example: `Completion(12, 0, (5, 9, 4), (7, 2), (-0.1, -1.5), FinishReason.STOP)`.

    Attributes:
        response_ids: the sampled tokens, at least one; after `STOP` the last one is the stop token.
        log_probs: for each response token, its log-prob over the full vocabulary under the sampling temperature
            (1 when greedy), before top-k and top-p: what the trainer computes for the same tokens.
    """

    prompt_id: int
    sample: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
