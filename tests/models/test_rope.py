"""Rotary settings: both spellings of config.json, every kind against transformers, and what is refused."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hybridflow.models.rope import RopeConfig, RopeKind, inverse_frequencies, rope_tables

KINDS = [
    dict(rope_type="default", rope_theta=1000.0),
    dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
    dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0),
    dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
         original_max_position_embeddings=64),
    dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64),
    dict(rope_type="yarn", rope_theta=10000.0, factor=16.0, original_max_position_embeddings=64, mscale=0.7,
         mscale_all_dim=0.4, beta_fast=16, beta_slow=2, truncate=False),
    dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, attention_factor=1.25),
]


@pytest.mark.parametrize("settings", KINDS, ids=lambda s: s["rope_type"])
def test_equals_transformers(settings):
    hf = LlamaConfig(hidden_size=48, num_attention_heads=2, max_position_embeddings=256, rope_parameters=settings)
    rope = RopeConfig.from_hf(hf.to_dict(), 256)
    positions = torch.arange(200)
    tables = rope_tables(rope, 24, positions, torch.float32)
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1), positions[None])
    torch.testing.assert_close(tables.cos[:, 0], cos[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(tables.signed_sin[:, 0, 12:], sin[0, :, 12:], rtol=0, atol=2e-5)
    torch.testing.assert_close(tables.signed_sin[:, 0, :12], -sin[0, :, :12], rtol=0, atol=2e-5)


@pytest.mark.parametrize("settings", KINDS, ids=lambda s: s["rope_type"])
def test_both_spellings_and_round_trip(settings):
    new = RopeConfig.from_hf({"rope_parameters": settings}, 256)
    scaling = {key: value for key, value in settings.items() if key != "rope_theta"}
    old = RopeConfig.from_hf({"rope_theta": settings["rope_theta"], "rope_scaling": scaling}, 256)
    legacy = RopeConfig.from_hf({"rope_theta": settings["rope_theta"], "rope_scaling":
                                 {"type" if key == "rope_type" else key: value for key, value in scaling.items()}}, 256)
    assert new == old == legacy == RopeConfig.from_hf(new.to_hf(), 256)


def test_no_settings_is_plain():
    assert RopeConfig.from_hf({"rope_theta": 5e5, "rope_scaling": None}, 128).kind is RopeKind.DEFAULT
    assert RopeConfig.from_hf({}, 128).theta == 10000.0


def test_by_hand():
    """head_dim 4, theta 100: one radian and a tenth per position; position 3, second pair: 0.3."""
    frequencies, scale = inverse_frequencies(RopeConfig(theta=100.0), 4, torch.device("cpu"))
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1]))
    assert scale == 1.0


@pytest.mark.parametrize(("hf", "key"), [
    ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_parameters.rope_type"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
])
def test_refused(hf, key):
    with pytest.raises(ValueError, match=key):
        RopeConfig.from_hf(hf, 128)


def test_dynamic_stops_at_its_length():
    rope = RopeConfig(kind=RopeKind.DYNAMIC, factor=2.0, max_positions=16)
    rope_tables(rope, 4, torch.arange(16), torch.float32)
    with pytest.raises(ValueError, match="dynamic.*16"):
        rope_tables(rope, 4, torch.arange(17), torch.float32)


def test_tables_are_computed_wide():
    """bf16 positions past 256 are not integers: angles must not be made in the model's dtype."""
    tables = rope_tables(RopeConfig(), 4, torch.tensor([257]), torch.bfloat16)
    torch.testing.assert_close(tables.cos[0, 0, 0], torch.tensor(257.0).cos().bfloat16())
    assert rope_tables(RopeConfig(), 4, torch.tensor([257]), torch.float64).cos.dtype is torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_position_has_the_same_bits_among_any_others(dtype):
    """Generation makes a table of all positions once, training one for each micro-batch."""
    rope = RopeConfig(max_positions=3000)
    whole = rope_tables(rope, 10, torch.arange(3000), dtype)
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        positions = torch.randint(3000, (1 + 3 * seed,), generator=draw)
        tables = rope_tables(rope, 10, positions, dtype)
        assert torch.equal(tables.cos, whole.cos[positions]) and torch.equal(tables.signed_sin,
                                                                             whole.signed_sin[positions])
