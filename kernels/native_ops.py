"""Tensors to the C++ kernels: packed weights and products. The arithmetic is in kernels/native/*.h.

Owns the checks of shapes and dtypes before a pointer leaves Python. It never decides between these kernels and torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_int, c_long, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hybridflow.kernels.native_build import NativeLibrary, Unavailable, native_library

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}  # as kernels/native/types.h
COMPUTE = {torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float64: torch.float64}


@dataclass(frozen=True)
class PackedWeight:
    """A weight [n, k] in the kernels' own layout (kernels/native/gemm.h): a copy, so new weights need a new one."""

    data: Tensor  # uint8 [bytes]
    n: int
    k: int
    dtype: torch.dtype


@cache
def library() -> ctypes.CDLL:
    """The library with its signatures declared.

    Raises:
        RuntimeError: it cannot be built here; `native_library()` says so beforehand.
    """
    found = native_library()
    if isinstance(found, Unavailable):
        raise RuntimeError(f"the native kernels are not available: {found.reason}")
    return declare(found)


def library_with(signatures: Mapping[str, list[Any]]) -> ctypes.CDLL:
    """The library with more entry points declared: argument types by name; they return nothing.

    Raises:
        RuntimeError: it cannot be built here.
    """
    found = library()
    for name, arguments in signatures.items():
        entry = found[name]
        entry.argtypes, entry.restype = arguments, None
        setattr(found, name, entry)
    return found


def declare(found: NativeLibrary) -> ctypes.CDLL:
    """Argument and result types of every entry point of api.cpp."""
    lib = found.library
    lib.hf_threads.argtypes, lib.hf_threads.restype = [c_int], None
    lib.hf_packed_bytes.argtypes, lib.hf_packed_bytes.restype = [c_int, c_long, c_long], c_size_t
    lib.hf_huge_pages.argtypes, lib.hf_huge_pages.restype = [c_void_p, c_size_t], None
    lib.hf_pack.argtypes = [c_int, c_void_p, c_long, c_long, c_long, c_long, c_void_p]
    lib.hf_pack.restype = None
    lib.hf_linear.argtypes = [c_int, c_void_p, c_long, c_long, c_void_p, c_void_p, c_long, c_long, c_int, c_int,
                              c_void_p, c_long]
    lib.hf_pack_pair.argtypes = [c_int, c_void_p, c_void_p, c_long, c_long, c_long, c_long, c_void_p]
    lib.hf_gated_linear.argtypes = [c_int, c_void_p, c_long, c_long, c_void_p, c_void_p, c_void_p, c_long, c_long,
                                    c_void_p, c_long]
    lib.hf_linear.restype = lib.hf_pack_pair.restype = lib.hf_gated_linear.restype = None
    return lib


def set_threads(threads: int) -> None:
    """How many threads every call uses from now on (1 until the first call of this). Results do not depend on it."""
    if threads < 1:
        raise ValueError(f"threads is {threads}: must be at least 1, for instance the number of cores")
    library().hf_threads(threads)


def pack(weight: Tensor) -> PackedWeight:
    """`weight` [n, k] with any strides, fp32, bf16 or fp64, copied into the kernels' layout."""
    return pack_all([weight])[0]


def pack_all(weights: Sequence[Tensor]) -> list[PackedWeight]:
    """Each weight packed, all in one allocation on huge pages: what a model is read from at every token."""
    sizes = [library().hf_packed_bytes(_code(weight), *weight.shape) for weight in weights]
    # torch aligns what it allocates to 64 bytes, as the panels want it; each weight begins on such a line.
    starts = [0, *accumulate((size + 63) // 64 * 64 for size in sizes)]
    data = torch.empty(starts[-1], dtype=torch.uint8)
    library().hf_huge_pages(data.data_ptr(), data.numel())
    packed = []
    for weight, start, size in zip(weights, starts, sizes):
        (n, k), place = weight.shape, data[start : start + size]
        library().hf_pack(_code(weight), weight.data_ptr(), n, k, *weight.stride(), place.data_ptr())
        packed.append(PackedWeight(place, n, k, weight.dtype))
    return packed


def linear(
    x: Tensor, packed: PackedWeight, bias: Tensor | None = None, segments: int = 1, wide: bool = False
) -> Tensor:
    """x W^T + bias in which a row's result does not depend on the other rows, bit for bit.

    Args:
        x: [..., k] of the weight's dtype; rows may be strided.
        bias: [n] of the same dtype, or None.
        segments: k is summed in this many parts that are added as a balanced binary tree; k must be a multiple.
        wide: the answer in the compute type (fp32 for bf16) instead of the weight's.

    Returns: [..., n].
    """
    _check(x, packed, bias, segments)
    rows = x.reshape(-1, packed.k)
    if rows.shape[0] and packed.k and rows.stride(1) != 1:
        rows = rows.contiguous()
    y = torch.empty(*x.shape[:-1], packed.n, dtype=COMPUTE[x.dtype] if wide else x.dtype)
    library().hf_linear(DTYPES[x.dtype], rows.data_ptr(), rows.shape[0], rows.stride(0), packed.data.data_ptr(),
                        None if bias is None else bias.data_ptr(), packed.n, packed.k, segments, int(wide),
                        y.data_ptr(), packed.n)
    return y


def pack_pair(gate: Tensor, up: Tensor) -> PackedWeight:
    """Both weights of a gated feed-forward, [n, k] each, for `gated_linear`; `n` is that of one of them."""
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.stride() != up.stride():
        raise ValueError(f"gate is {list(gate.shape)} {gate.dtype}, up {list(up.shape)} {up.dtype}: must be alike, in "
                         "strides too")
    code, (n, k) = _code(gate), gate.shape
    data = torch.empty(2 * library().hf_packed_bytes(code, n, k), dtype=torch.uint8)
    library().hf_huge_pages(data.data_ptr(), data.numel())
    library().hf_pack_pair(code, gate.data_ptr(), up.data_ptr(), n, k, *gate.stride(), data.data_ptr())
    return PackedWeight(data, n, k, gate.dtype)


def gated_linear(x: Tensor, pair: PackedWeight) -> Tensor:
    """silu(x G^T) * (x U^T) for x [rows, k] (Shazeer 2020, eq. 6): the bits of `linear` twice and `swiglu`, without
    the two answers in memory. Returns [rows, n].
    """
    _check(x, pair, None, 1)
    y = torch.empty(x.shape[0], pair.n, dtype=x.dtype)
    library().hf_gated_linear(DTYPES[x.dtype], x.data_ptr(), x.shape[0], x.stride(0), pair.data.data_ptr(), None, None,
                              pair.n, pair.k, y.data_ptr(), pair.n)
    return y


def _check(x: Tensor, packed: PackedWeight, bias: Tensor | None, segments: int) -> None:
    _code(x)
    if x.dtype != packed.dtype or x.shape[-1] != packed.k:
        raise ValueError(f"x is {list(x.shape)} {x.dtype}: the packed weight takes [..., {packed.k}] {packed.dtype}")
    if bias is not None and (bias.shape != (packed.n,) or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise ValueError(f"bias is {list(bias.shape)} {bias.dtype}: must be contiguous [{packed.n}] {x.dtype}")
    if segments < 1 or packed.k % segments:
        raise ValueError(f"segments is {segments}: must divide k, which is {packed.k}")


def _code(tensor: Tensor) -> int:
    if tensor.dtype not in DTYPES or tensor.device.type != "cpu":
        raise ValueError(f"a tensor is {tensor.dtype} on {tensor.device}: must be fp32, bf16 or fp64 on the CPU")
    return DTYPES[tensor.dtype]
