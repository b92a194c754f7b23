"""Counter-based randomness: one uniform per (seed, prompt id, sample, position), and no state anywhere.

Owns the integer mixing, in numpy on the host, where all four counters are known ahead. A draw depends on them only, so
never on the layout, the batch a row was in or the order of rows (rule 4 of the design).
"""

from __future__ import annotations

import numpy as np

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(state: np.ndarray) -> np.ndarray:
    """The output of SplitMix64 whose state, before the step, is `state` (Steele, Lea, Flood 2014, figure 17).

    Args:
        state: uint64, any shape.

    Returns:
        uint64 of the same shape: a bijection of `state`.
    """
    z = state + GOLDEN_GAMMA
    z ^= z >> 30
    z *= MIX_1
    z ^= z >> 27
    z *= MIX_2
    z ^= z >> 31
    return z


def stream_keys(seed: int, prompt_ids: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """One 64-bit key per sample: the start of its own SplitMix64 stream.

    Args:
        seed: any Python integer (its low 64 bits count).
        prompt_ids, samples: int64 `[rows]`.

    Returns:
        uint64 `[rows]`. For one seed and prompt, different samples have different keys (every step is a bijection).
    """
    start = splitmix64(np.array([seed % 2**64], dtype=np.uint64))
    return splitmix64(splitmix64(start ^ prompt_ids.astype(np.uint64)) ^ samples.astype(np.uint64))


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The draw number `positions` of each stream: float64 in [0, 1), a multiple of 2^-53.

    Args:
        keys: uint64 `[rows]` from `stream_keys`.
        positions: int64, of a shape that goes with `[rows]`; 0 for the first token of a response.

    Returns:
        float64 of the shape that both have together.
    """
    return (splitmix64(keys + positions.astype(np.uint64) * GOLDEN_GAMMA) >> 11) * 2.0**-53
