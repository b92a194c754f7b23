"""Tensors to the C++ kernels of a trainer: norm, rotation and activation with their gradients, and a head's logits.

Owns the checks of shapes and dtypes before a pointer leaves Python, and the word on whether there are such kernels.
They do in one pass over memory what takes torch several on a CPU; results differ from torch's by rounding.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int, c_long, c_void_p
from functools import cache

import torch
from torch import Tensor

from hybridflow.kernels.native_build import NativeLibrary, native_library
from hybridflow.kernels.native_ops import COMPUTE, DTYPES, library_with

POINTER, LONG = c_void_p, c_long
SIGNATURES = {
    "hf_swiglu_backward": [c_int, POINTER, POINTER, LONG, LONG, POINTER],
    "hf_rms_norm_scaled": [c_int, POINTER, LONG, LONG, POINTER, c_double, POINTER, POINTER],
    "hf_rms_norm_backward": [c_int, *[POINTER] * 4, LONG, LONG, POINTER, POINTER],
    "hf_rotate": [c_int, POINTER, LONG, LONG, LONG, LONG, POINTER, POINTER, c_int, POINTER, LONG],
    "hf_logit_statistics": [c_int, POINTER, LONG, LONG, c_double, *[POINTER] * 4],
    "hf_logit_gradients": [c_int, POINTER, LONG, LONG, c_double, *[POINTER] * 6],
}


def has_kernels(x: Tensor) -> bool:
    """Whether these compute with tensors like `x`. Compiles the library where no process of this user has."""
    return x.device.type == "cpu" and x.dtype in DTYPES and isinstance(native_library(), NativeLibrary)


@cache
def backward_library() -> ctypes.CDLL:
    """The library with the signatures of backward.cpp declared.

    Raises:
        RuntimeError: it cannot be built here.
    """
    return library_with(SIGNATURES)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of `gate_up` `[..., 2 * size]` from `grad` `[..., size]`, that of `silu(gate) * up`."""
    grad, gate_up, size = grad.contiguous(), gate_up.contiguous(), grad.shape[-1]
    assert gate_up.shape == (*grad.shape[:-1], 2 * size) and grad.dtype == gate_up.dtype, (grad.shape, gate_up.shape)
    out = torch.empty_like(gate_up)
    backward_library().hf_swiglu_backward(DTYPES[grad.dtype], grad.data_ptr(), gate_up.data_ptr(),
                                          gate_up.numel() // (2 * size), size, out.data_ptr())
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`kernels.norm.rms_norm`, and 1 / sqrt(mean(x^2) + eps) of each row `[rows]` in fp32 or better."""
    assert weight.shape == x.shape[-1:] and weight.dtype == x.dtype, (x.shape, weight.shape, x.dtype, weight.dtype)
    x, weight, size = x.contiguous(), weight.contiguous(), x.shape[-1]
    rows, out = x.numel() // size, torch.empty_like(x)
    scales = torch.empty(rows, dtype=COMPUTE[x.dtype])
    backward_library().hf_rms_norm_scaled(DTYPES[x.dtype], x.data_ptr(), rows, size, weight.data_ptr(), eps,
                                          out.data_ptr(), scales.data_ptr())
    return out, scales


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `x` and `weight` from that of the norm, and from what `rms_norm` gave."""
    grad, x, weight, size = grad.contiguous(), x.contiguous(), weight.contiguous(), x.shape[-1]
    assert grad.shape == x.shape and grad.dtype == x.dtype == weight.dtype and scales.dtype == COMPUTE[x.dtype]
    rows, grad_x, grad_weight = x.numel() // size, torch.empty_like(x), torch.empty(size, dtype=scales.dtype)
    assert scales.shape == (rows,) and scales.is_contiguous(), (scales.shape, rows)
    backward_library().hf_rms_norm_backward(DTYPES[x.dtype], grad.data_ptr(), x.data_ptr(), weight.data_ptr(),
                                            scales.data_ptr(), rows, size, grad_x.data_ptr(), grad_weight.data_ptr())
    return grad_x, grad_weight.to(weight.dtype)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor, *, back: bool = False) -> Tensor:
    """`kernels.rope.apply_rope`; `back` is by the opposite angles. Tokens may lie apart, as in a fused projection."""
    tokens, heads, size = x.shape
    assert cos.shape == signed_sin.shape == (tokens, 1, size) and cos.dtype == signed_sin.dtype == x.dtype, cos.shape
    if not (x.stride(2) == 1 and x.stride(1) == size):
        x = x.contiguous()
    cos, signed_sin, out = cos.contiguous(), signed_sin.contiguous(), x.new_empty(x.shape)
    backward_library().hf_rotate(DTYPES[x.dtype], x.data_ptr(), x.stride(0), tokens, heads, size, cos.data_ptr(),
                                 signed_sin.data_ptr(), int(back), out.data_ptr(), heads * size)
    return out


def logit_statistics(logits: Tensor, factor: float, targets: Tensor, mine: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row z of `logits` `[rows, vocab]` (fp32, fp64) times `factor`: max z `[rows]`; and `[3, rows]`: the sums
    of e^(z - max) and e^(z - max) (z - max), and z - max at `targets` (int64 `[rows]`), 0 where `mine` is False.
    """
    rows, vocab = logits.shape
    _check_logits(logits, targets, mine)
    peaks, sums = logits.new_empty(rows), logits.new_empty(3, rows)
    backward_library().hf_logit_statistics(DTYPES[logits.dtype], logits.data_ptr(), rows, vocab, factor,
                                           targets.data_ptr(), mine.data_ptr(), peaks.data_ptr(), sums.data_ptr())
    return peaks, sums


def logit_gradients_(logits: Tensor, factor: float, targets: Tensor, mine: Tensor, log_normaliser: Tensor,
                     entropy: Tensor, grad_log_prob: Tensor | None, grad_entropy: Tensor | None) -> Tensor:
    """The gradient of `logits` in their place, `factor` included; columns `[rows]`, of which None is zero."""
    rows, vocab = logits.shape
    _check_logits(logits, targets, mine)
    columns = [column if column is None else column.contiguous()
               for column in (log_normaliser, entropy, grad_log_prob, grad_entropy)]
    assert all(c is None or (c.shape == (rows,) and c.dtype == logits.dtype) for c in columns), (rows, logits.dtype)
    backward_library().hf_logit_gradients(
        DTYPES[logits.dtype], logits.data_ptr(), rows, vocab, factor, targets.data_ptr(), mine.data_ptr(),
        *(None if column is None else column.data_ptr() for column in columns))
    return logits


def _check_logits(logits: Tensor, targets: Tensor, mine: Tensor) -> None:
    assert logits.is_contiguous() and logits.dtype in (torch.float32, torch.float64), logits.dtype
    assert targets.shape == mine.shape == logits.shape[:1], (targets.shape, mine.shape, logits.shape)
    assert targets.dtype == torch.int64 and mine.dtype == torch.bool, (targets.dtype, mine.dtype)
    assert targets.is_contiguous() and mine.is_contiguous()
