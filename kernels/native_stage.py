"""The records that a stage's step passes to the C++ kernels, field by field those of kernels/native/stage.h.

Owns their layout and the signatures of stage.cpp. Whoever fills a record keeps the tensors alive that it points to.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int, c_int64, c_long, c_void_p
from functools import cache

from hybridflow.kernels.native_ops import library


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
            "h", "normed", "qkv", "seen", "partial", "gate_up", "active", "out")),
    ]


@cache
def stage_library() -> ctypes.CDLL:
    """The library with the signatures of stage.cpp declared.

    Raises:
        RuntimeError: it cannot be built here.
    """
    found = library()
    found.hf_stage.argtypes = [c_void_p, c_void_p, c_long, c_long, c_int, c_int]
    found.hf_copy_blocks.argtypes = [c_void_p, c_void_p, c_long, c_long]
    found.hf_stage.restype = found.hf_copy_blocks.restype = None
    return found
