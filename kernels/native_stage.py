"""The records that a stage's step passes to the C++ kernels, field by field those of kernels/native/stage.h, and the
memory that all its packed matrices share.

Owns their layout and the signatures of stage.cpp. Whoever fills a record keeps the tensors alive that it points to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int, c_int64, c_long, c_void_p
from functools import cache

import torch
from torch import Tensor

from hybridflow.kernels.native_ops import DTYPES, library


class StageLayer(ctypes.Structure):
    """Weights of one layer: packed matrices, vectors as they are, null where there is none."""

    _fields_ = [(name, c_void_p) for name in (
        "input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "out_bias",
        "post_norm", "gate_up", "gate_up_bias", "down", "down_bias")]


class Stage(ctypes.Structure):
    """What is the same from step to step."""

    _fields_ = [
        *((name, c_int64) for name in (
            "dtype", "num_layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "segments", "vocab_first",
            "vocab_rows", "num_blocks")),
        ("eps", c_double),
        *((name, c_void_p) for name in ("embedding", "final_norm", "cos", "sin", "keys", "values", "layers")),
    ]


class Step(ctypes.Structure):
    """The tokens of a step and the room it works in."""

    _fields_ = [
        *((name, c_int64) for name in ("tokens", "num_decode", "samples", "width")),
        *((name, c_void_p) for name in (
            "ids", "positions", "slots", "tables", "sampled", "x",
            "h", "normed", "qkv", "seen", "partial", "active", "out")),
    ]


class Draw(ctypes.Structure):
    """The head, and the room and the results of a draw behind a step."""

    _fields_ = [
        ("vocab", c_int64), ("temperature", c_double),
        *((name, c_void_p) for name in ("head", "uniforms", "logits", "blocks", "tokens", "log_probs")),
    ]


@cache
def stage_library() -> ctypes.CDLL:
    """The library with the signatures of stage.cpp declared.

    Raises:
        RuntimeError: it cannot be built here.
    """
    found = library()
    found.hf_stage.argtypes = [c_void_p, c_void_p, c_long, c_long, c_int, c_int]
    found.hf_stage_and_draw.argtypes = [c_void_p, c_void_p, c_void_p]
    found.hf_copy_blocks.argtypes = [c_void_p, c_void_p, c_long, c_long]
    found.hf_stage.restype = found.hf_stage_and_draw.restype = found.hf_copy_blocks.restype = None
    found.hf_statistics_bytes.argtypes, found.hf_statistics_bytes.restype = [c_int, c_long], c_long
    return found


class PackedMatrices:
    """Matrices in the kernels' layout, one after another in one piece of memory on huge pages. It is touched as it is
    filled, so that each original can go as soon as it is packed.

    Args:
        shapes: `[n, k]` of each matrix that will be packed; of a pair, that of both, one below the other.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        self._library, self._code = stage_library(), DTYPES[dtype]
        # The halves of a pair are padded each.
        total = sum(max(self._bytes(n, k), 2 * self._bytes(-(-n // 2), k)) for n, k in shapes)
        self._memory = torch.empty(total, dtype=torch.uint8)
        self._library.hf_huge_pages(self._memory.data_ptr(), total)
        self._used = 0

    def pack(self, weight: Tensor) -> int:
        """Where `weight` `[n, k]` lies, packed for a product."""
        place = self._take(self._bytes(*weight.shape))
        self._library.hf_pack(self._code, weight.data_ptr(), *weight.shape, *weight.stride(), place)
        return place

    def pack_pair(self, gate_up: Tensor) -> int:
        """Where the halves of `gate_up` `[2 n, k]` lie, packed for a gated product."""
        gate, up = gate_up.chunk(2)
        place = self._take(2 * self._bytes(*gate.shape))
        self._library.hf_pack_pair(self._code, gate.data_ptr(), up.data_ptr(), *gate.shape, *gate.stride(), place)
        return place

    def _bytes(self, n: int, k: int) -> int:
        """A whole number of cache lines."""
        return -(-self._library.hf_packed_bytes(self._code, n, k) // 64) * 64

    def _take(self, size: int) -> int:
        place, self._used = self._memory.data_ptr() + self._used, self._used + size
        assert self._used <= self._memory.numel(), (self._used, self._memory.numel())
        return place
