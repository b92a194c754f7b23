"""Draws from softmax distributions over the vocabulary, and their log-probs: in C++ on a CPU, else in torch.

Owns the choice between the two, and the memory of torch's weights, allocated once. It knows no sampling settings but
the temperature, and no random state.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hybridflow.kernels import native_rows
from hybridflow.kernels.native_build import NativeLibrary, native_library


class Categorical(Protocol):
    """softmax(logits / temperature) of rows of logits `[rows, vocab]`, fp32 or fp64; temperature 0 is greedy, with the
    log-probs of temperature 1. A row without a finite logit gives some token and a NaN log-prob.
    """

    def draw(self, logits: Tensor, uniforms: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
        """The token at which the running sum of probabilities first exceeds `uniforms` (fp64 `[rows]` in [0, 1); None
        when greedy, which takes the lowest of the likeliest): never one of probability 0.

        Returns:
            tokens int64 `[rows]` and their log-probs `[rows]` in the dtype of the logits.
        """

    def log_probs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        """Of `tokens` `[rows]`, as `draw` gives them."""


def categorical_for(device: torch.device, vocab_size: int) -> Categorical:
    """The C++ kernels on a CPU that has them: their log-probs have the bits of batch-invariant training."""
    if device.type == "cpu" and isinstance(native_library(), NativeLibrary):
        return NativeCategorical()
    return TorchCategorical(vocab_size)


class NativeCategorical:
    """One pass over memory for the statistics of a row; bits do not depend on other rows."""

    def draw(self, logits: Tensor, uniforms: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
        return native_rows.sample(logits, uniforms, temperature)

    def log_probs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        return native_rows.log_probs(logits, tokens, temperature or 1.0)


class TorchCategorical:
    """Weights `exp((logits - top) / temperature)` in blocks of about sqrt(vocab) tokens, the last one filled up with
    zeros: a sum over the vocabulary is made of sums of blocks, of which a draw needs the running sum, and then that of
    one block. A running sum over the whole vocabulary is serial (3 to 4 times slower at 32 x 4096 on one core).
    Nothing waits for a device.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._width = block_width(vocab_size)
        self._memory = torch.empty(0)

    def draw(self, logits: Tensor, uniforms: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
        blocks, sums, top = self._weighed(logits, temperature or 1.0)
        if temperature == 0:
            tokens = logits.argmax(-1)
        else:
            assert uniforms is not None
            block, rest = _locate(sums, uniforms.unsqueeze(-1) * sums.sum(-1, keepdim=True))
            inside = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, self._width)).squeeze(1).double()
            token, _ = _locate(inside, rest)
            tokens = (block * self._width + token).squeeze(-1).clamp_(max=self._vocab_size - 1)  # NaN leaves the range
        return tokens, _log_probs(logits, tokens, sums, top, temperature or 1.0)

    def log_probs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        _, sums, top = self._weighed(logits, temperature or 1.0)
        return _log_probs(logits, tokens, sums, top, temperature or 1.0)

    def _weighed(self, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Blocks of weights `[rows, blocks, width]`, their sums fp64 `[rows, blocks]`, the largest logits `[rows, 1]`.
        """
        blocks, top = self._room(logits), logits.amax(-1, keepdim=True)
        weights = torch.sub(logits, top, out=blocks.flatten(1)[:, : self._vocab_size])
        if temperature != 1:
            weights /= temperature
        weights.exp_()
        # Sums of some hundred fp32 weights are right to 1e-7; in fp64 they take 5 times as long on a CPU.
        return blocks, blocks.sum(-1).double(), top

    def _room(self, logits: Tensor) -> Tensor:
        """Memory `[rows, blocks, width]` that is zero behind the vocabulary."""
        rows, memory = len(logits), self._memory
        if len(memory) < rows or memory.dtype != logits.dtype or memory.device != logits.device:
            blocks = -(-self._vocab_size // self._width)
            self._memory = logits.new_zeros(rows, blocks, self._width)
        return self._memory[:rows]


def block_width(vocab_size: int) -> int:
    """A power of two near the root of the vocabulary. Example: `block_width(32000) == 256`."""
    return 1 << ((vocab_size - 1).bit_length() + 1) // 2


def _log_probs(logits: Tensor, tokens: Tensor, sums: Tensor, top: Tensor, temperature: float) -> Tensor:
    """In fp64, since differences of large logits would cost the digits that matter; then in the logits' dtype."""
    above = logits.gather(-1, tokens.unsqueeze(-1)).double() - top
    return (above / temperature - sums.sum(-1, keepdim=True).log()).squeeze(-1).to(logits.dtype)


def _locate(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose running sum exceeds `target`, and what of `target` is left there; both `[rows, 1]`."""
    running = weights.cumsum(-1)
    total = running[:, -1:]
    # strictly under the total, so that some index exceeds it however the sums were rounded
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(running, target, right=True).clamp_(max=weights.shape[-1] - 1)
    before = (running - weights).gather(-1, index)
    return index, (target - before).clamp_(min=0)
