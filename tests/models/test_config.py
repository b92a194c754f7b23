"""ModelConfig: read from transformers' configs, what is refused, and the config.json of a spec."""

import json

import pytest
import torch
from transformers import AutoConfig

from hybridflow.models.config import Family, ModelConfig
from hybridflow.models.rope import RopeConfig, RopeKind
from tests.models.hf_models import hf_config, save_random

PLAIN = dict(model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=32, hidden_size=16,
             intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)


def test_families():
    llama, qwen2, qwen3 = (ModelConfig.from_hf_dict(hf_config(kind).to_dict()) for kind in ("llama", "qwen2", "qwen3"))
    assert (llama.family, llama.qkv_bias, llama.qk_norm, llama.head_dim, llama.num_kv_heads) == (
        Family.LLAMA, False, False, 8, 2)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.tie_word_embeddings) == (True, False, True)
    assert (qwen3.qk_norm, qwen3.head_dim, qwen3.qkv_bias) == (True, 12, False)
    assert llama.rope.kind is RopeKind.LLAMA3 and llama.rope.original_max_positions == 16


def test_defaults_of_what_is_not_there():
    config = ModelConfig.from_hf_dict(PLAIN)
    assert (config.num_kv_heads, config.head_dim, config.tie_word_embeddings, config.eos_token_ids) == (4, 4, False, ())
    assert ModelConfig.from_hf_dict(PLAIN | {"model_type": "qwen3", "architectures": None}).head_dim == 128
    assert ModelConfig.from_hf_dict(PLAIN | {"eos_token_id": [2, 9]}).eos_token_ids == (2, 9)
    biased = ModelConfig.from_hf_dict(PLAIN | {"attention_bias": True, "mlp_bias": True})
    assert biased.qkv_bias and biased.o_bias and biased.mlp_bias


@pytest.mark.parametrize(("change", "key"), [
    ({"model_type": "mixtral"}, "model_type: 'mixtral'"),
    ({"model_type": "qwen3_moe"}, "model_type: 'qwen3_moe'"),
    ({"architectures": ["LlamaForQuestionAnswering"]}, "architectures: 'LlamaForQuestionAnswering'"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"num_experts": 8}, "num_experts: 8"),
    ({"vocab_size": "273"}, "vocab_size: '273' is not a whole number"),
    ({"hidden_size": 32.0}, "hidden_size: 32.0 is not a whole number"),
    ({"eos_token_id": [2, "3"]}, "eos_token_id: '3' is not a whole number"),
    ({"num_hidden_layers": -1}, "num_hidden_layers: -1 is not a whole number from 1"),
    ({"head_dim": 5}, "head_dim: 5: .* only an even one"),
    ({"rope_parameters": "x"}, "rope_parameters: 'x' is not a block"),
    ({"vocab_size": None, "hidden_size": None}, "vocab_size: missing; hidden_size: missing"),
])
def test_refused(change, key):
    with pytest.raises(ValueError, match=key):
        ModelConfig.from_hf_dict(PLAIN | change)


def test_no_folder(tmp_path):
    with pytest.raises(ValueError, match="no config.json"):
        ModelConfig.from_hf_folder(tmp_path)


@pytest.mark.parametrize(("file", "content", "why"), [
    ("config.json", b"[]", "config.json: holds list"),
    ("config.json", b"{", "config.json: "),
    ("model.safetensors", b"", "model.safetensors: is no safetensors file"),
    ("model.safetensors", b"\x10" + bytes(7) + b"{", "model.safetensors: is no safetensors file"),
    ("model.safetensors", (37).to_bytes(8, "little") + b'{"a":{"shape":[2],"data_offsets":[0,8]}}'[:37],
     "model.safetensors: is no safetensors file"),
    ("model.safetensors", (40).to_bytes(8, "little") + b'{"a":{"shape":[2],"data_offsets":[0,8]}}' + bytes(7),
     "model.safetensors: has 55 bytes where its header says 56"),
    ("model.safetensors.index.json", b"{}", "model.safetensors.index.json: has no weight_map"),
])
def test_a_broken_file_is_named(tmp_path, file, content, why):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=why):
        ModelConfig.from_hf_folder(tmp_path)


def test_folder_keeps_the_dtype_of_the_files(tmp_path):
    """The files decide, whatever config.json says."""
    folder = save_random("qwen2", tmp_path / "m", torch.bfloat16)
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf | {"dtype": "float32"}))
    config = ModelConfig.from_hf_folder(folder)
    assert config.file_dtype is torch.bfloat16 and config.tensor_dtypes == {}


@pytest.mark.parametrize("family", Family)
def test_spec_round_trip(family, tmp_path):
    """A config made from a spec reads back as itself, here and in transformers."""
    config = ModelConfig(family, 32, 16, 24, 2, 4, 2, 8, qkv_bias=family is Family.QWEN2,
                         qk_norm=family is Family.QWEN3,
                         rope=RopeConfig(5e5, RopeKind.LINEAR, factor=2.0, max_positions=2048), eos_token_ids=(2, 9))
    assert ModelConfig.from_hf_dict(config.to_hf_dict()) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf_dict()))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert ModelConfig.from_hf_dict(theirs.to_dict()) == config
    assert theirs.rope_parameters["rope_type"] == "linear" and theirs.rope_parameters["factor"] == 2.0


@pytest.mark.parametrize(("pad", "bos", "expected"), [
    (0, 1, 0), (2, 1, 1), (None, 1, 1), (None, None, None), (2, 2, None)])
def test_a_classifier_pads_with_no_id_that_ends_a_row(pad, bos, expected):
    read = ModelConfig.from_hf_dict({**ModelConfig(Family.QWEN2, 64, 32, 48, 2, 4, 2, 8, bos_token_id=bos,
                                                   eos_token_ids=(2,)).to_hf_dict(), "pad_token_id": pad})
    hf = read.as_classifier().to_hf_dict()
    assert hf["architectures"] == ["Qwen2ForSequenceClassification"] and hf["pad_token_id"] == expected
    assert ModelConfig.from_hf_dict(hf) == read and read.to_hf_dict()["architectures"] == ["Qwen2ForCausalLM"]
