"""One token per row from its logits: penalties, temperature, cuts, and the inverse of the cumulative distribution.

Owns the choice and its log-probs. It knows tensors only: no group, no cache, no text; draws come from the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.generation.categorical import Categorical, categorical_for
from hybridflow.generation.cuts import logit_floor
from hybridflow.generation.records import SamplingParams


@dataclass(frozen=True)
class Choice:
    """A token for each row. Example: `Choice(tensor([7, 2]), tensor([-0.1, -1.5]), None)`.

    Attributes:
        tokens: int64 `[rows]`.
        log_probs: raw ones `[rows]`: over the full vocabulary, under the sampling temperature (1 when greedy), before
            penalties and cuts. It is what the trainer computes for the same token, so that the ratio of PPO starts at
            1. fp32, or fp64 for fp64 logits.
        processed: `[rows]`, of the distribution that was drawn from, of the same dtype; when greedy, of the one under
            temperature 1 of which the token is the likeliest. None where it is the raw one.
    """

    tokens: Tensor
    log_probs: Tensor
    processed: Tensor | None


class Sampler:
    """Chooses under one set of parameters, in memory that it keeps from step to step. Nothing waits for a device.

    The order is that of `SamplingParams`: shortest response, repetition, temperature, top-k, top-p, min-p.
    """

    def __init__(self, params: SamplingParams, vocab_size: int,
                 categorical: Callable[[torch.device, int], Categorical] = categorical_for) -> None:
        """`categorical` makes what draws on the device of the logits.

        Raises:
            ValueError: a stop id is not in the vocabulary, or all tokens are stop ids though none may be drawn at
                first.
        """
        faults = [f"stop id {stop} is not in the vocabulary of {vocab_size}"
                  for stop in params.stop_ids if not 0 <= stop < vocab_size]
        if params.min_new_tokens and len({*params.stop_ids}) == vocab_size:
            faults.append(f"min_new_tokens is {params.min_new_tokens}, but every token is a stop id; it must be 0")
        if faults:
            raise ValueError("sampling: " + "; ".join(faults))
        self._params, self._vocab_size = params, vocab_size
        self._make, self._categorical = categorical, None  # made where the first logits are
        self._stops = torch.tensor(params.stop_ids, dtype=torch.int64)
        self._room = torch.empty(0)

    def choose(self, logits: Tensor, draws: Tensor, counts: Tensor, seen: Tensor | None = None) -> Choice:
        """The next token of each row.

        Args:
            logits: `[rows, vocab]`, any float dtype; computed with in fp32 or better, and left as it is.
            draws: fp64 `[rows]` in [0, 1); not read when greedy.
            counts: int64 `[rows]`, how many tokens each response has.
            seen: bool `[rows, vocab]`, the tokens that repetition_penalty is about (`SeenTokens`); None without it.

        Returns:
            A row without a single finite logit gives some valid token and a NaN log-prob.
        """
        if self._categorical is None:
            self._categorical = self._make(logits.device, self._vocab_size)
        temperature = self._params.temperature
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        allowed = self._allowed(logits, counts, seen)
        tokens, log_probs = self._categorical.draw(allowed, draws if temperature else None, temperature)
        if allowed is logits:
            return Choice(tokens, log_probs, None)
        return Choice(tokens, self._categorical.log_probs(logits, tokens, temperature), log_probs)

    def _allowed(self, logits: Tensor, counts: Tensor, seen: Tensor | None) -> Tensor:
        """Logits of the distribution to draw from, -inf where nothing may be drawn; the same tensor, and not an equal
        one, where that is the raw one."""
        params = self._params
        if params.draws_raw:
            return logits
        if params.min_new_tokens and params.stop_ids:
            logits = self._without_stops(logits, counts)
        if params.repetition_penalty != 1:
            assert seen is not None, "a repetition penalty needs to know which tokens were seen"
            penalty = params.repetition_penalty
            logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        floor = None if params.temperature == 0 else logit_floor(logits, params)
        if floor is None:
            return logits
        if self._room.shape != logits.shape or self._room.dtype != logits.dtype or self._room.device != logits.device:
            self._room = torch.empty_like(logits)
        return self._room.copy_(logits).masked_fill_(logits < floor, -torch.inf)

    def _without_stops(self, logits: Tensor, counts: Tensor) -> Tensor:
        """A copy without stop ids in rows that are too short for them."""
        if self._stops.device != logits.device:
            self._stops = self._stops.to(logits.device)
        short = (counts < self._params.min_new_tokens).unsqueeze(-1)
        return logits.index_copy(1, self._stops, logits[:, self._stops].masked_fill(short, -torch.inf))
