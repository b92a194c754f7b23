"""What a run reads before its ranks meet: the tensors of every model that it will load."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridflow.models.config import Head, ModelConfig
from hybridflow.models.weights import canonical_shapes
from hybridflow.trainer.inputs import require_weights

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
