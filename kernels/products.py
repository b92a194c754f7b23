"""The products of a trainer's linear layers: torch's, or our own on CPUs where they are faster.

Owns the choice between the two. Neither has a gradient of its own.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_long, c_void_p
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridflow.kernels.native_build import NativeLibrary, native_library
from hybridflow.kernels.native_ops import DTYPES, library_with

SIGNATURES = {"hf_product": [c_int, c_void_p, *[c_long] * 2, c_void_p, *[c_long] * 4, c_int, c_void_p, c_long]}
# Fewer rows do not pay for packing the weight, smaller weights not for a call.
FEWEST_ROWS, SMALLEST = 64, 32
# Rows of x that lie a multiple of so many bytes apart fight for one set of the first-level cache.
ALIASED = 4096


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` `[tokens, in]` W^T + b for `weight` `[out, in]` and `bias` `[out]`."""
    if not gains(x, weight):
        return F.linear(x, weight, bias)
    if bias is None:
        return product(x, weight, x.new_empty(x.shape[0], weight.shape[0]), add=False)
    return product(x, weight, bias.expand(x.shape[0], -1).contiguous(), add=True)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """`x` `[tokens, out]` W for `weight` `[out, in]`: the gradient of a linear's input."""
    if not gains(x, weight.T):
        return x @ weight
    return product(x, weight.T, x.new_empty(x.shape[0], weight.shape[1]), add=False)


def gains(x: Tensor, weight: Tensor) -> bool:
    """Whether `x` W^T is computed here and not by torch."""
    return (x.device.type == "cpu" and x.dtype is torch.float32 is weight.dtype and x.dim() == 2
            and x.shape[0] >= FEWEST_ROWS and min(weight.shape) >= SMALLEST and x.stride(1) == 1
            and x.stride(0) * x.itemsize % ALIASED != 0 and native_gains())


@cache
def native_gains() -> bool:
    """Whether this machine is one on which ours are faster. Compiles the library where no process of this user has."""
    found = native_library()
    return isinstance(found, NativeLibrary) and bool(found.library.hf_product_gains())


@cache
def products_library() -> ctypes.CDLL:
    """The library with the signatures of products.cpp declared.

    Raises:
        RuntimeError: it cannot be built here.
    """
    return library_with(SIGNATURES)


def product(x: Tensor, weight: Tensor, y: Tensor, *, add: bool) -> Tensor:
    """`y` `[rows, n]`, into which `x` `[rows, k]` W^T is written, or to which it is added. fp32 or fp64 on a CPU;
    `weight` is `[n, k]` with any strides, rows of `x` may lie apart. A row's bits depend on no other row.
    """
    (rows, k), n = x.shape, weight.shape[0]
    assert weight.shape[1] == k and y.shape == (rows, n) and y.is_contiguous(), (x.shape, weight.shape, y.shape)
    assert x.stride(1) == 1 and x.dtype == weight.dtype == y.dtype != torch.bfloat16, (x.stride(), x.dtype, y.dtype)
    products_library().hf_product(DTYPES[x.dtype], x.data_ptr(), rows, x.stride(0), weight.data_ptr(), n, k,
                                  *weight.stride(), int(add), y.data_ptr(), n)
    return y
