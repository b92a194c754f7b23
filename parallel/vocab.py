"""Everything that is cut over the vocabulary: embedding, log-probabilities with entropy, and full logits for sampling.

Ranks hold ragged, balanced row ranges; padded vocabulary rows do not exist. Softmax statistics are fp32 at least, from
logits that were never rounded to a narrower type. Never decides which positions are read: callers pass those rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hybridflow.kernels.native_backward import has_kernels, logit_gradients_, logit_statistics
from hybridflow.parallel.collectives import all_gather, all_reduce, reduce_from, reduce_scatter_tokens
from hybridflow.parallel.mesh import AxisGroup
from hybridflow.parallel.tiles import Tiles
from hybridflow.parallel.weight_grads import add_product

# Logits of this many rows x local vocabulary exist at once (128 MiB in fp32), whatever the number of targets.
LOGITS_AT_ONCE = 1 << 25
# On a CPU no more than stay in its caches, as long as a product has some rows: large blocks are fresh pages every time.
CPU_LOGITS, CPU_ROWS = 1 << 20, 128
# So many are kept from a forward on a CPU to its backward, rather than computed twice (32 MiB in fp32).
KEPT_LOGITS = 1 << 23


def vocab_range(vocab_size: int, parts: int, index: int) -> tuple[int, int]:
    """Half-open row range of part `index`; parts differ by at most one row. `vocab_range(37, 4, 0) == (0, 10)`.

    Raises:
        ValueError: fewer rows than parts.
    """
    if vocab_size < parts:
        raise ValueError(f"vocab_size {vocab_size} cannot be cut over tp {parts}: use tp <= {vocab_size}")
    rows, extra = divmod(vocab_size, parts)
    start = index * rows + min(index, extra)
    return start, start + rows + (index < extra)


class VocabParallelEmbedding(nn.Module):
    """Embedding whose rows are cut over `tp`: `[tokens]` ids -> `[tokens, hidden]`, or `[tokens/tp, hidden]` of my
    tokens under sequence parallelism. Every id must lie in `[0, vocab_size)`: data is checked where it is read.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tp: AxisGroup,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.start, self.end = vocab_range(vocab_size, tp.size, tp.index)
        self.weight = nn.Parameter(torch.empty(self.end - self.start, hidden_size, dtype=dtype, device=device))
        self.tiles: Tiles | None = None

    def forward(self, ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return self._look_up(ids)
        row, mine = local_rows(ids, self.start, self.end)
        partial = self._look_up(row).masked_fill(~mine[:, None], 0.0)
        return reduce_scatter_tokens(partial, self.tp) if self.sequence_parallel else reduce_from(partial, self.tp)

    def _look_up(self, row: Tensor) -> Tensor:
        return F.embedding(row, self.weight) if self.tiles is None else self.tiles.embedding(row)


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    tp: AxisGroup,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and the entropy of its distribution, under softmax(hidden W^T / temperature).

    Backward needs one collective, the sum of the gradient of `hidden`. It computes the local logits again, but for few
    of them on a CPU (`KEPT_LOGITS`): nothing else of vocabulary size is kept.

    Args:
        hidden: `[targets, hidden]`, equal on every rank of `tp`; its gradient is summed over `tp` here.
        weight: `[vocab/tp, hidden]`, this rank's `vocab_range` of the head.
        targets: `[targets]` int64.
        temperature: > 0; divides the logits.
        with_entropy: whether to compute the entropy (nats), which is differentiable too.
    Returns:
        log-probabilities `[targets]` and entropy `[targets]` (None unless asked for), in fp32, or fp64 for fp64 input.
    Raises:
        ValueError: a temperature that is not positive.
    """
    if not temperature > 0.0:
        raise ValueError(f"temperature {temperature} must be > 0 to score tokens (0 means greedy, for sampling only)")
    start, end = vocab_range(vocab_size, tp.size, tp.index)
    assert weight.shape[0] == end - start, (weight.shape, start, end)
    keep = torch.is_grad_enabled() and hidden.shape[0] * weight.shape[0] <= KEPT_LOGITS
    return TokenLogProbs.apply(hidden, weight, targets, tp, start, temperature, with_entropy, keep)


def gather_logits(hidden: Tensor, weight: Tensor | Tiles, tp: AxisGroup, vocab_size: int) -> Tensor:
    """Full logits `[rows, vocab]` (fp32, or fp64 for fp64 input) of `hidden` `[rows, hidden]`, on every rank of `tp`.

    For sampling: no gradient passes.
    """
    with torch.no_grad():
        x = _operand(hidden)
        if isinstance(weight, Tiles):
            local = weight.rows_by(lambda rows: _matmul(x, _operand(rows).T))  # [rows, vocab/tp]
        else:
            local = _matmul(x, _operand(weight).T)
        return gather_columns(local, tp, vocab_size)


def gather_columns(local: Tensor, tp: AxisGroup, vocab_size: int) -> Tensor:
    """`[rows, vocab]` on every rank of `tp` from each one's `vocab_range` of the columns; no gradient passes."""
    if tp.size == 1:
        return local
    ranges = [vocab_range(vocab_size, tp.size, index) for index in range(tp.size)]
    widest = max(end - start for start, end in ranges)
    columns = F.pad(local, (0, widest - local.shape[1])).T  # [widest, rows]: equal shapes for the all-gather
    parts = all_gather(columns, tp).split(widest)
    return torch.cat([part[: end - start] for part, (start, end) in zip(parts, ranges, strict=True)]).T.contiguous()


class TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        tp: AxisGroup,
        start: int,
        temperature: float,
        with_entropy: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        row, mine = local_rows(targets, start, start + weight.shape[0])
        peak, sums, ctx.logits = _local_statistics(_operand(hidden), _operand(weight), row, mine, temperature, keep)
        top = all_reduce(peak.clone(), tp, dist.ReduceOp.MAX)
        # All is relative to the local peak: move it to the global one before adding it up. The target stays relative to
        # the peak to the end, since differences of large logits would cost the digits that matter.
        sums[1] += (peak - top) * sums[0]
        sums[:2] *= torch.exp(peak - top)
        sums[2] += (peak - top) * mine
        total, weighted, target = all_reduce(sums, tp)
        log_total = total.log()
        entropy = log_total - weighted / total
        log_normaliser = top + log_total
        ctx.save_for_backward(hidden, weight, row, mine, log_normaliser, entropy)
        ctx.tp, ctx.temperature = tp, temperature
        ctx.set_materialize_grads(False)  # an entropy that is only logged must not cost its gradient
        return target - log_total, entropy if with_entropy else None

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, row, mine, log_normaliser, entropy = ctx.saved_tensors
        x, w = _operand(hidden), _operand(weight)
        grad_x = torch.empty(hidden.shape, dtype=log_normaliser.dtype, device=hidden.device)
        grad_w = torch.zeros(weight.shape, dtype=log_normaliser.dtype, device=weight.device)
        logits, ctx.logits = ctx.logits, None  # overwritten: a second backward computes them again
        for number, rows in enumerate(row_slices(hidden.shape[0], weight.shape[0], hidden.device)):
            z = _matmul(x[rows], w.T) if logits is None else logits[number]
            grad = _logit_grad(z, ctx.temperature, row[rows], mine[rows], log_normaliser[rows],
                               entropy[rows], None if grad_log_prob is None else grad_log_prob[rows],
                               None if grad_entropy is None else grad_entropy[rows]).to(x.dtype)
            grad_x[rows] = _matmul(grad, w)
            add_product(grad_w, grad, x[rows])
        return all_reduce(grad_x.to(hidden.dtype), ctx.tp), grad_w.to(weight.dtype), *[None] * 6


def _logit_grad(
    logits: Tensor, temperature: float, row: Tensor, mine: Tensor, log_normaliser: Tensor, entropy: Tensor,
    grad_log_prob: Tensor | None, grad_entropy: Tensor | None,
) -> Tensor:
    """Gradient `[rows, vocab/tp]` of `logits` of that shape (overwritten), from columns `[rows]`.

    d log p_target = onehot - p and d entropy = -p (log p + entropy); None is a gradient of zero.
    """
    if has_kernels(logits):
        return logit_gradients_(logits, 1.0 / temperature, row, mine, log_normaliser, entropy, grad_log_prob,
                                grad_entropy)
    log_p = logits.div_(temperature).sub_(log_normaliser[:, None])
    if grad_entropy is None:
        factor = grad_log_prob[:, None]
    else:
        factor = (log_p + entropy[:, None]).mul_(grad_entropy[:, None])
        if grad_log_prob is not None:
            factor += grad_log_prob[:, None]
    grad = log_p.exp_().mul_(factor).neg_()
    if grad_log_prob is not None:
        grad.scatter_add_(1, row[:, None], (grad_log_prob * mine)[:, None])
    return grad.div_(temperature)


def _local_statistics(
    x: Tensor, w: Tensor, row: Tensor, mine: Tensor, temperature: float, keep: bool
) -> tuple[Tensor, Tensor, list[Tensor] | None]:
    """Of this rank's logits z: max z `[targets]`, and `[3, targets]`: sum e^(z - max), sum e^(z - max) (z - max),
    z - max of the target (0 where another rank has it). Last the logits by slices, to `keep` where kernels leave them
    as they are.
    """
    peaks, sums, kept = [], [], []
    for rows in row_slices(x.shape[0], w.shape[0], x.device):
        z = _matmul(x[rows], w.T)  # [rows, vocab/tp]
        if has_kernels(z):
            peak, found = logit_statistics(z, 1.0 / temperature, row[rows], mine[rows])
            peaks.append(peak)
            sums.append(found)
            if keep:
                kept.append(z)
            continue
        peak = z.div_(temperature).amax(1)
        z -= peak[:, None]
        target = z.gather(1, row[rows, None])[:, 0] * mine[rows]
        e = z.exp()
        peaks.append(peak)
        sums.append(torch.stack([e.sum(1), (e * z).sum(1), target]))
    return torch.cat(peaks), torch.cat(sums, dim=1), kept or None


def local_rows(ids: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """Local row of each id, 0 where the id is another rank's, and which are mine."""
    mine = (ids >= start) & (ids < end)
    return (ids - start).masked_fill(~mine, 0), mine


def row_slices(num_rows: int, width: int, device: torch.device) -> list[slice]:
    """Slices of the rows whose logits may exist at once; one empty slice if there are no rows."""
    step = LOGITS_AT_ONCE // width
    if device.type == "cpu":
        step = min(step, max(CPU_LOGITS // width, CPU_ROWS))
    step = max(1, step)
    return [slice(first, first + step) for first in range(0, max(num_rows, 1), step)]


def _operand(x: Tensor) -> Tensor:
    """`x` as a factor of `_matmul`: half types stay as they are only where the device can multiply them into fp32."""
    if x.device.type == "cuda" or x.dtype in (torch.float32, torch.float64):
        return x
    return x.float()


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a b in fp32 at least. Logits rounded to bf16 would miss log-probabilities by 5e-2."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32)
