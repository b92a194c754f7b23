"""What the keys of a config make of an engine where they leave something open."""

from pathlib import Path

import pytest
import torch

from hybridflow.generation.weight_home import WeightMode
from hybridflow.trainer.engine_options import weight_mode
from tests.trainer.runs import tiny_config

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(("overrides", "dtype", "device", "mode"), [
    ((), torch.float32, CPU, WeightMode.PACKED), ((), torch.float64, CPU, WeightMode.PACKED),
    ((), torch.bfloat16, CPU, WeightMode.SHARED), ((), torch.float32, GPU, WeightMode.SHARED),
    (("train.offload.roles=true",), torch.bfloat16, GPU, WeightMode.PACKED),
    (("generation.batch_invariant=true",), torch.bfloat16, CPU, WeightMode.PACKED),
    (("generation.weights=shared",), torch.float32, CPU, WeightMode.SHARED),
    (("generation.weights=packed",), torch.bfloat16, GPU, WeightMode.PACKED)])
def test_weights_are_shared_where_decoding_is_not_slower(overrides: tuple[str, ...], dtype: torch.dtype,
                                                         device: torch.device, mode: WeightMode, tmp_path: Path):
    assert weight_mode(tiny_config(tmp_path, tmp_path, overrides), dtype, device) is mode
