"""A distribution over the vocabulary per row, as unnormalised weights in blocks: its log-probs, and one draw of each.

Owns the memory of the weights, allocated once. It knows no sampling settings but the temperature, and no random state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Normaliser:
    """What turns logits z into log-probs: `(z - top) / temperature - log_total`.

    Attributes:
        top: `[rows, 1]`, the largest logit, of the logits' dtype.
        log_total: fp64 `[rows, 1]`, log of the sum of `exp((z - top) / temperature)`.
    """

    top: Tensor
    log_total: Tensor
    temperature: float

    def log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Of `tokens` `[rows]` under `logits` `[rows, vocab]`, in the logits' dtype `[rows]`. Taken in fp64, since
        differences of large logits would cost the digits that matter."""
        above = logits.gather(-1, tokens.unsqueeze(-1)).double() - self.top
        return (above / self.temperature - self.log_total).squeeze(-1).to(logits.dtype)


class Categorical:
    """The weights `exp((logits - top) / temperature)` of some rows.

    Rows are cut into blocks of about sqrt(vocab) tokens, the last one filled up with zeros: a sum over the vocabulary
    is made of sums of blocks, of which a draw needs the running sum, and then that of one block. A running sum over the
    whole vocabulary is serial (3 to 4 times slower at 32 x 4096 on one core).
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._width = block_width(vocab_size)
        self._memory = torch.empty(0)
        self._blocks = self._sums = self._memory  # of the rows that are in

    @property
    def weights(self) -> Tensor:
        """`[rows, vocab]`, 1 at the likeliest token."""
        return self._blocks.flatten(1)[:, : self._vocab_size]

    def fill(self, logits: Tensor, temperature: float) -> Normaliser:
        """Take the rows of `logits` `[rows, vocab]`, fp32 or fp64, in place of those before."""
        self._blocks = self._room(logits)
        top = logits.amax(-1, keepdim=True)
        weights = torch.sub(logits, top, out=self.weights)
        if temperature != 1:
            weights /= temperature
        weights.exp_()
        return Normaliser(top, self._total().log(), temperature)

    def cut(self, floor: Tensor) -> Tensor:
        """Tokens with a weight below `floor` `[rows, 1]` cannot be drawn any more. Returns the log of what is left, as
        `Normaliser.log_total`."""
        weights = self.weights
        weights *= weights >= floor
        return self._total().log()

    def draw(self, uniforms: Tensor) -> Tensor:
        """The token at which the running sum first exceeds `uniforms` (fp64 `[rows]` in [0, 1)) times the total: never
        one of weight 0. int64 `[rows]`; some token in a row of NaN."""
        block, rest = _locate(self._sums, uniforms.unsqueeze(-1) * self._sums.sum(-1, keepdim=True))
        inside = self._blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, self._width)).squeeze(1).double()
        token, _ = _locate(inside, rest)
        return (block * self._width + token).squeeze(-1).clamp_(max=self._vocab_size - 1)  # NaN leaves the range

    def _total(self) -> Tensor:
        # Sums of some hundred fp32 weights are right to 1e-7; in fp64 they take 5 times as long on a CPU.
        self._sums = self._blocks.sum(-1).double()
        return self._sums.sum(-1, keepdim=True)

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


def _locate(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose running sum exceeds `target`, and what of `target` is left there; both `[rows, 1]`."""
    running = weights.cumsum(-1)
    total = running[:, -1:]
    # strictly under the total, so that some index exceeds it however the sums were rounded
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(running, target, right=True).clamp_(max=weights.shape[-1] - 1)
    before = (running - weights).gather(-1, index)
    return index, (target - before).clamp_(min=0)
