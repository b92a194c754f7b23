"""What goes into a generation engine and what comes out: frozen records of token ids and log-probs.

Owns no behaviour beyond refusing values that cannot be sampled with. It never holds tensors or text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

OnEnd = Callable[[int, tuple[int, ...]], None]  # of a request, its index among the prompts and its response ids


def is_moderate(factor: float) -> bool:
    """Whether fp32 logits can be multiplied and divided by it."""
    return 1e-6 <= factor <= 1e6


class FinishReason(Enum):
    """Why a response ended: a stop token was sampled (and is its last token) or completed a stop string; it has
    `max_new_tokens` tokens; or generation was interrupted, and it can be resumed.
    """

    STOP = "stop"
    LENGTH = "length"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. Example: `SamplingParams(max_new_tokens=64, temperature=0.7, stop_ids=(2,))`.

    What restricts the choice is applied in the order of the attributes: min_new_tokens, repetition_penalty,
    temperature, top_k, top_p, min_p, each to what the one before left.

    Attributes:
        max_new_tokens: the longest response, in tokens, its stop token included.
        min_new_tokens: before a response has so many tokens, no stop id can be drawn and no stop string ends it; 0 is
            off.
        repetition_penalty: the logits of tokens that the prompt or the response has already are divided by it where
            they are positive, multiplied where negative (Keskar et al. 2019, arXiv 1909.05858, section 4.1); 1 is off,
            below 1 rewards repetition.
        temperature: logits are divided by it; 0 is greedy (the lowest id among equal maxima).
        top_k: only the k most probable tokens can be drawn; 0 is off. Tokens tied with the k-th stay in.
        top_p: only the most probable tokens that together reach this mass can be drawn, the one that crosses it
            included (Holtzman et al. 2019, arXiv 1904.09751), and those tied with it; of what top_k left. 1 is off.
        min_p: only tokens at least `min_p` times as probable as the most probable one can be drawn (Nguyen et al. 2024,
            arXiv 2407.01082); 0 is off.
        stop_ids: each of them ends a response, and is its last token.
        stop_strings: a response ends with the token that completes one of them in its text.

    Raises:
        ValueError: a value is out of range.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rules = [
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1, such as 64"),
            ("min_new_tokens", self.min_new_tokens, 0 <= self.min_new_tokens <= self.max_new_tokens,
             f"0 (off) or more, and at most max_new_tokens {self.max_new_tokens}"),
            ("repetition_penalty", self.repetition_penalty, is_moderate(self.repetition_penalty),
             "from 1e-6 to 1e6, such as 1.1; 1 is off"),
            ("temperature", self.temperature, self.temperature == 0 or is_moderate(self.temperature),
             "0 (greedy) or from 1e-6 to 1e6, such as 1.0"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more, such as 50"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1 (off), such as 0.95"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "0 (off) or more and at most 1, such as 0.05"),
            ("stop_strings", self.stop_strings, all(self.stop_strings), "strings of at least one character"),
        ]
        faults = [f"{name} is {value}; it must be {rule}" for name, value, holds, rule in rules if not holds]
        if faults:
            raise ValueError("sampling: " + "; ".join(faults))

    @property
    def draws_raw(self) -> bool:
        """Whether tokens are always drawn from the raw distribution (greedy ones from that under temperature 1, cut to
        its likeliest token), so that no processed log-prob differs from the raw one.
        """
        unpenalised = self.repetition_penalty == 1 and (not self.min_new_tokens or not self.stop_ids)
        uncut = not self.top_k and self.top_p == 1 and not self.min_p
        return unpenalised and (uncut or self.temperature == 0)


@dataclass(frozen=True)
class Begun:
    """The part of a response that an interrupted generation left. Example: `Begun((7, 2), (-0.1, -1.5), None, (3, 3))`.

    Attributes:
        response_ids, log_probs, processed_log_probs, versions: as of the `Completion` that it was.
    """

    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    processed_log_probs: tuple[float, ...] | None
    versions: tuple[int, ...]

    @classmethod
    def of(cls, completion: Completion) -> Begun:
        """What to resume an interrupted completion with."""
        return cls(completion.response_ids, completion.log_probs, completion.processed_log_probs, completion.versions)


@dataclass(frozen=True)
class Prompt:
    """One sample to make. Example: `Prompt(id=12, sample=0, ids=(5, 9, 4))`.

    Attributes:
        id: the global prompt id; with the seed and `sample` it decides every draw.
        sample: which of the prompt's samples this is.
        ids: the prompt's tokens, at least one.
        begun: what the response starts with; None starts a new one.
        max_new_tokens: its own limit on the response, what was begun included; None is that of the sampling parameters,
            which it can only lower.
    """

    id: int
    sample: int
    ids: tuple[int, ...]
    begun: Begun | None = None
    max_new_tokens: int | None = None

    def longest(self, params: SamplingParams) -> int:
        """Tokens of the longest response."""
        return params.max_new_tokens if self.max_new_tokens is None else min(self.max_new_tokens, params.max_new_tokens)


def greedily(params: SamplingParams) -> SamplingParams:
    """The same limits and ends with the likeliest token everywhere."""
    return replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


@dataclass(frozen=True)
class Completion:
    """One finished sample. Example: `Completion(12, 0, (5, 9, 4), (7, 2), (-0.1, -1.5), FinishReason.STOP)`.

    Attributes:
        response_ids: the sampled tokens, at least one unless interrupted; where a stop id ended it, that is the last.
        log_probs: raw ones: for each response token, its log-prob over the full vocabulary under the sampling
            temperature (1 when greedy), before anything else: what the trainer computes for the same tokens, and what
            the algorithm uses.
        processed_log_probs: for each response token, its log-prob in the distribution that it was drawn from; when
            greedy, in the one under temperature 1 of which it is the likeliest. None where that is the raw one.
        versions: for each response token, the version of the weights that drew it.
    """

    prompt_id: int
    sample: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    processed_log_probs: tuple[float, ...] | None = None
    versions: tuple[int, ...] = ()
