"""What only a GPU can show of generation: captured decode steps give what plain ones give, a step behind the host."""

from dataclasses import replace

import pytest
import torch

from hybridflow.generation.records import SamplingParams
from hybridflow.generation.torch_runner import TorchRunner
from hybridflow.parallel.world import World
from tests.generation.small_model import assert_same, make_generator, make_prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PARAMS = SamplingParams(max_new_tokens=40, temperature=0.8, stop_ids=(2, 9))
PROMPTS = make_prompts([1, 9, 2, 40, 41, 9, 17, 70], samples=3)


def test_graphs_change_no_token(monkeypatch: pytest.MonkeyPatch):
    world = World.single(torch.device("cuda", 0))
    captured = make_generator(world).generate(PROMPTS, PARAMS, seed=1)
    monkeypatch.setattr(TorchRunner, "run", TorchRunner._forward)
    assert_same(make_generator(world).generate(PROMPTS, PARAMS, seed=1), captured, tolerance=1e-9)


@pytest.mark.parametrize("params", [PARAMS, replace(PARAMS, top_p=0.9, repetition_penalty=1.2)])
def test_a_device_samples_what_a_cpu_does(params: SamplingParams):
    there = make_generator(World.single(torch.device("cuda", 0))).generate(PROMPTS, params, seed=2)
    assert_same(there, make_generator(World.single(torch.device("cpu"))).generate(PROMPTS, params, seed=2), 1e-9)
