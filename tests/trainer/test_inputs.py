"""What a run reads before its ranks meet: the tensors of every model that it will load."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridflow.config.tools_schema import ToolsConfig
from hybridflow.data.tokenizer import open_tokenizer
from hybridflow.kernels.native_build import Unavailable
from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.weights import canonical_shapes
from hybridflow.response_text import ResponseEnds
from hybridflow.trainer import inputs
from hybridflow.trainer.inputs import (
    _observation_form,
    require_cache,
    require_invariance,
    require_vllm,
    response_ends,
)
from hybridflow.trainer.model_folders import require_weights
from tests.config.builders import config
from tests.data.test_huggingface import write_folder

SHAPE = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 4}


@pytest.mark.parametrize(("head", "change", "why"), [
    (Head.LANGUAGE_MODEL, {"lm_head.weight": None}, "lm_head.weight: missing"),
    (Head.LANGUAGE_MODEL, {"model.foo": (2,)}, "model.foo: not a tensor"),
    (Head.SCORE, {}, "score.weight: missing"),
    (Head.SCORE, {"score.weight": (3, 16)}, r"score.weight: shape \(3, 16\)"),
    (Head.SCORE, {"score.weight": (1, 16)}, None),
    (Head.VALUE, {}, None),  # a fresh one is drawn
])
def test_a_folder_has_the_tensors_of_its_model(tmp_path: Path, head: Head, change: dict, why: str | None):
    shapes = canonical_shapes(ModelConfig.from_hf_dict(SHAPE), Head.LANGUAGE_MODEL) | change
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    save_file({name: torch.zeros(shape) for name, shape in shapes.items() if shape}, tmp_path / "model.safetensors")
    if why is None:
        return require_weights("model.path", str(tmp_path), head)
    with pytest.raises(ValueError, match=why):
        require_weights("model.path", str(tmp_path), head)


class Words:
    """A tokenizer as far as ends are concerned: every letter is a token, and END is one."""

    stop_ids = (2,)

    def encode(self, text):
        return [7] if text == "END" else [ord(letter) - ord("a") + 10 for letter in text]


def test_stops_are_ids_strings_of_one_token_and_other_strings():
    model = ModelConfig.from_hf_dict(SHAPE | {"eos_token_id": [2, 4]})
    ends = response_ends([9, "END", "ab", "a", "ab", 4], Words(), model)
    assert ends == ResponseEnds((2, 4, 9, 7, 10), ("ab",))
    with pytest.raises(ValueError, match=r"stop 32 is no id of the vocabulary; ids are 0 to 31; generation.stop 'z'"):
        response_ends([32, "z"], Words(), model)


def test_a_cache_holds_at_least_one_response():
    """2 layers of 4 heads of 4 numbers, keys and values: 8 KiB of fp64 for a block of 16 tokens."""
    model = ModelConfig.from_hf_dict(SHAPE | {"max_position_embeddings": 100_000})
    asked = config("generation.kv_cache_mb=1", "generation.max_new_tokens=1953", "train.mixed_precision=fp64")
    require_cache(asked, model, 96)
    with pytest.raises(ValueError, match="kv_cache_mb = 1: a prompt of 97 tokens .* take 2 MiB .* choose 2 or more"):
        require_cache(asked, model, 97)
    require_cache(config("generation.kv_cache_mb=1", "generation.max_new_tokens=4000", "generation.layout.pp=2",
                         "train.mixed_precision=fp64"), model, 97)


def test_vllm_must_be_there_and_know_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    asked = config("generation.engine=vllm", f"model.tokenizer={tmp_path}")
    with pytest.raises(ValueError, match=r"engine = vllm: .* cannot import vLLM \(.*vllm.*\); install it there, or"):
        require_vllm(asked, ResponseEnds((2,), ()))
    with pytest.raises(ValueError, match="'ab' has several tokens, .* name the folder of one in model.tokenizer"):
        require_vllm(asked, ResponseEnds((2,), ("ab",)))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot import vLLM"):
        require_vllm(asked, ResponseEnds((2,), ("ab",)))


def test_a_role_of_tools_needs_a_template_with_turns(tmp_path: Path):
    write_folder(tmp_path, template=None)
    with pytest.raises(ValueError, match="tools.role = user: has no effect with a tokenizer without a chat template"):
        _observation_form(ToolsConfig(role="user"), open_tokenizer(tmp_path))
    assert _observation_form(ToolsConfig(), open_tokenizer(tmp_path)).head
    write_folder(tmp_path)
    assert _observation_form(ToolsConfig(role="user"), open_tokenizer(tmp_path)).head


def test_the_same_bits_need_a_cpu_with_a_compiler(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="generation.batch_invariant = true: .* would be on cuda; choose false"):
        require_invariance(torch.device("cuda", 0))
    monkeypatch.setattr(inputs, "native_library", lambda: Unavailable("no C++ compiler: none of c++, g++"))
    with pytest.raises(ValueError, match=r"cannot be had: no C\+\+ compiler"):
        require_invariance(torch.device("cpu"))
