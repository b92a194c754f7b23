"""Which angles a model rotates by: the rotary settings of a Hugging Face config.json, and the tables of one forward.

Owns the frequency formulas. The rotation itself is `kernels.rope`; heads are rotated whole (no partial rotary).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class RopeKind(Enum):
    """How frequencies are stretched past the length a model was trained on."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


NEEDED = {
    RopeKind.DEFAULT: (),
    RopeKind.LINEAR: ("factor",),
    RopeKind.DYNAMIC: ("factor",),
    RopeKind.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor"),
    RopeKind.YARN: ("factor",),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary settings. `None` in an optional field means that the formula's own default holds.

    `max_positions` is the config's max_position_embeddings, `original_max_positions` the length before stretching.
    Example: `RopeConfig(theta=500000.0)` is plain RoPE with Llama 3's base.
    """

    theta: float = 10000.0
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    max_positions: int = 2048
    original_max_positions: int = 2048
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @classmethod
    def from_hf(cls, hf: dict[str, Any], max_positions: int) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4).

        Raises:
            ValueError: an unknown kind, a missing factor, partial rotary or settings per layer type; names the key.
        """
        key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
        settings = dict(hf.get(key) or {})
        if any(isinstance(value, dict) for value in settings.values()):
            raise ValueError(f"{key}: {settings}: one setting for all layers is supported, not one per layer type")
        kind = _kind(key, settings)
        missing = [f"{key}.{name}" for name in NEEDED[kind] if settings.get(name) is None]
        if missing:
            raise ValueError(f"{', '.join(missing)}: needed by rope type {kind.value!r} and not there")
        if settings.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
            raise ValueError(f"{key}.partial_rotary_factor: heads are rotated whole; only 1.0 is supported")
        given = {name: settings[name] for name in OPTIONAL if settings.get(name) is not None}
        original = hf.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
        return cls(theta=float(settings.get("rope_theta") or hf.get("rope_theta") or cls.theta), kind=kind,
                   max_positions=max_positions, original_max_positions=int(original or max_positions), **given)

    def to_hf(self) -> dict[str, Any]:
        """`rope_theta` and `rope_scaling`, which transformers 4 and 5 both read, and which read back as this."""
        if self.kind is RopeKind.DEFAULT:
            return {"rope_theta": self.theta, "rope_scaling": None}
        given = {name: getattr(self, name) for name in OPTIONAL if getattr(self, name) is not None}
        scaling = {"rope_type": self.kind.value, "original_max_position_embeddings": self.original_max_positions}
        return {"rope_theta": self.theta, "rope_scaling": scaling | given}


OPTIONAL = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "mscale", "mscale_all_dim",
            "beta_fast", "beta_slow", "truncate")


def _kind(key: str, settings: dict[str, Any]) -> RopeKind:
    name = settings.get("rope_type") or settings.get("type") or "default"
    try:
        return RopeKind(name)
    except ValueError:
        known = ", ".join(kind.value for kind in RopeKind)
        raise ValueError(f"{key}.rope_type: {name!r} is not supported; supported are {known}") from None


@dataclass(frozen=True)
class RopeTables:
    """What `kernels.rope.apply_rope` takes: both `[tokens, 1, head_dim]`, in the model's dtype."""

    cos: Tensor
    signed_sin: Tensor


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> tuple[Tensor, float]:
    """Radians per position of each rotated pair `[head_dim/2]` fp32, and the factor on cos and sin.

    Kept in fp32, as every other engine does: at position 10^5 a frequency of other precision is another angle.
    Sources: linear, arXiv 2306.15595; llama3, section 3.2 of arXiv 2407.21783; yarn, arXiv 2309.00071 section 3.
    """
    powers = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    plain = 1.0 / rope.theta**powers
    match rope.kind:
        case RopeKind.DEFAULT | RopeKind.DYNAMIC:
            return plain, 1.0
        case RopeKind.LINEAR:
            return plain / rope.factor, 1.0
        case RopeKind.LLAMA3:
            return _llama3(rope, plain), 1.0
        case RopeKind.YARN:
            return _yarn(rope, plain, head_dim), _yarn_attention_factor(rope)


def rope_tables(rope: RopeConfig, head_dim: int, position_ids: Tensor, dtype: torch.dtype) -> RopeTables:
    """The tables of `position_ids` `[tokens]`, computed in fp32 (fp64 for an fp64 model), returned in `dtype`.

    Raises:
        ValueError: `dynamic` scaling and a position past max_position_embeddings. There its frequencies depend on
            the length of the sequence so far, so that cached keys and a trainer's keys would differ.
    """
    if rope.kind is RopeKind.DYNAMIC and position_ids.numel() and int(position_ids.max()) >= rope.max_positions:
        raise ValueError(f"rope type 'dynamic' is supported up to max_position_embeddings = {rope.max_positions} "
                         f"tokens, and a row has {int(position_ids.max()) + 1}: use 'yarn' or shorter rows")
    frequencies, scale = inverse_frequencies(rope, head_dim, position_ids.device)
    wide = torch.promote_types(dtype, torch.float32)
    angles = position_ids.to(wide)[:, None] * frequencies.to(wide)  # [tokens, head_dim/2]
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return RopeTables(torch.cat([cos, cos], -1)[:, None].to(dtype), torch.cat([-sin, sin], -1)[:, None].to(dtype))


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Wavelengths past the original length are stretched, short ones kept, those between blended."""
    turns = rope.original_max_positions * plain / (2 * math.pi)  # full turns over the original length
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """Pairs of fewer than `beta_slow` turns over the original length are stretched, of more than `beta_fast` kept."""

    def pair_with(turns: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device=plain.device)
    stretch = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / rope.factor * stretch + plain * (1 - stretch)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
